#include "foremoe/plan/source_tokens.h"

#include <cassert>

namespace foremoe {

SourceTokens::SourceTokens(const RoutingTrace& trace, const Batching& batching)
    : trace_(trace), num_ranks_(batching.num_ranks) {
  const std::size_t num_sequences = batching.rank.size();
  assert(num_sequences == static_cast<std::size_t>(trace.num_sequences()));
  const auto source_of = [&](std::size_t s) {
    return batching.micro_step[s].index() * num_ranks_ + batching.rank[s].index();
  };

  first_.assign(static_cast<std::size_t>(batching.num_micro_steps) * num_ranks_ + 1, 0);
  for (std::size_t s = 0; s < num_sequences; ++s) ++first_[source_of(s) + 1];
  for (std::size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];

  sequences_.resize(num_sequences);
  std::vector<std::size_t> next(first_);
  for (std::size_t s = 0; s < num_sequences; ++s) sequences_[next[source_of(s)]++] = static_cast<int>(s);
}

std::span<const int> SourceTokens::sequences(MicroStepId m, RankId source) const {
  const std::size_t i = m.index() * num_ranks_ + source.index();
  return std::span(sequences_).subspan(first_[i], first_[i + 1] - first_[i]);
}

void SourceTokens::gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const {
  const std::size_t top_k = static_cast<std::size_t>(trace_.top_k);
  routes.clear();
  for (const int s : sequences(m, source)) {
    for (std::int64_t token = trace_.cu_seqlens[s]; token < trace_.cu_seqlens[s + 1]; ++token) {
      routes.resize(routes.size() + top_k);
      trace_.route(token, l, std::span(routes).last(top_k));
    }
  }
}

}  // namespace foremoe
