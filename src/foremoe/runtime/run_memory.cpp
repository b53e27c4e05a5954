#include "foremoe/runtime/run_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/core/memory_limit.h"

namespace foremoe {
namespace {

double gib(Bytes bytes) { return static_cast<double>(bytes.value) / (1024.0 * 1024.0 * 1024.0); }

double as_bytes(double floats) { return floats * static_cast<double>(sizeof(float)); }

struct TokenCounts {
  double all = 0;
  double most_of_source = 0;  // most tokens of one source in one micro-step
};

TokenCounts count_tokens(const MemoryNeed& need) {
  TokenCounts tokens;
  for (int m = 0; m < need.load.num_micro_steps(); ++m) {
    for (int r = 0; r < need.load.num_ranks(); ++r) {
      const auto of_source = static_cast<double>(need.routes.num_tokens(MicroStepId{m}, RankId{r}));
      tokens.all += of_source;
      tokens.most_of_source = std::max(tokens.most_of_source, of_source);
    }
  }
  return tokens;
}

}  // namespace

std::vector<std::int64_t> most_rows_at_homes(const LoadTable& load, ArrayView<const RankId, 2> home) {
  std::vector<std::int64_t> of_expert(static_cast<std::size_t>(load.num_experts()));
  std::vector<std::int64_t> most(static_cast<std::size_t>(load.num_ranks()));
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    for (int l = 0; l < load.num_layers(); ++l) {
      load.expert_loads(MicroStepId{m}, LayerId{l}, of_expert);
      std::vector<std::int64_t> of_rank(most.size());
      for (std::size_t e = 0; e < of_expert.size(); ++e) of_rank[home(l, e).index()] += of_expert[e];
      for (std::size_t r = 0; r < most.size(); ++r) most[r] = std::max(most[r], of_rank[r]);
    }
  }
  return most;
}

Bytes estimate_memory(const MemoryNeed& need) {
  const LoadTable& load = need.load;
  const TokenCounts tokens = count_tokens(need);
  const double hidden = need.model.shape.hidden;
  const double intermediate = need.model.shape.intermediate;
  const double layers = need.model.layers;
  const double k = need.model.top_k;
  const double expert = 3 * hidden * intermediate;  // floats per expert
  const double experts = layers * need.model.experts * expert;
  const double part_here = static_cast<double>(need.ranks_here) / load.num_ranks();

  // Weights, gradients and Adam's moments.
  const double homes = as_bytes(experts) * (1.0 + (need.backward ? 1 : 0) + (need.backward && need.adam ? 2 : 0));
  const double guests = as_bytes(layers * load.num_ranks() * need.guest_slots * expert) * (need.backward ? 2 : 1);
  const double arena = need.arena && need.guest_slots > 0 ? as_bytes(experts) : 0;

  // Activations: floats per row of an expert and per token, for all layers of the micro-steps in flight.
  const double kept_layers = need.backward ? layers * std::min(need.in_flight, load.num_micro_steps()) : 1;
  const double row = 2 * hidden + 2 * intermediate;
  const std::vector<std::int64_t> most_rows = most_rows_at_homes(load, need.home);
  const auto rows = static_cast<double>(std::accumulate(most_rows.begin(), most_rows.end(), std::int64_t{0}));
  const double micro_step_tokens = tokens.most_of_source * load.num_ranks();
  const double activations =
      as_bytes(kept_layers * (rows * row + micro_step_tokens * hidden) + 2 * rows * (2 * hidden + intermediate));

  // Outputs, input gradients and routes used. Rank 0 stores two more copies if they are gathered.
  const double results = as_bytes(tokens.all * (hidden * (need.backward ? 2 : 1) + layers * k));
  double reference = 0;
  if (need.reference) {  // the reference computes in float64
    reference = 2 * results + (need.backward ? 2 * as_bytes(experts) : 0);
    reference += 2 * as_bytes(2 * tokens.all * hidden + experts * (need.adam ? 4 : 2));
    reference += 2 * as_bytes(layers * tokens.most_of_source * (k * row + hidden));
    reference *= 2;  // variances, for tensors that are compared with their rounding errors
  }
  return Bytes{static_cast<std::int64_t>((homes + guests + activations + results) * part_here + arena + reference)};
}

void expect_enough_memory(const MemoryNeed& need) {
  const Bytes wanted = estimate_memory(need);
  const Bytes available = available_memory();
  if (wanted <= available) return;
  throw InputError({.file = need.load.name, .field = {}, .index = {}},
                   fmt::format("the run needs about {:.1f} GiB of memory, {:.1f} GiB are free; reduce --hidden ({}), "
                               "--intermediate ({}), --layers or --micro-steps, or give --no-reference",
                               gib(wanted), gib(available), need.model.shape.hidden, need.model.shape.intermediate));
}

}  // namespace foremoe
