#include "foremoe/runtime/replay_routes.h"

#include <algorithm>

#include "foremoe/plan/assign_rows.h"

namespace foremoe {
namespace {

class RecordedRoutes final : public ReplayRoutes {
 public:
  RecordedRoutes(const RoutingTrace& trace, const Batching& batching)
      : tokens_(trace, batching),
        num_tokens_({std::size_t(batching.num_micro_steps), std::size_t(batching.num_ranks)}) {
    for (int s = 0; s < trace.num_sequences(); ++s) {
      num_tokens_(batching.micro_step[s], batching.rank[s]) += trace.sequence_length(s);
    }
  }

  int top_k() const override { return tokens_.top_k(); }
  std::int64_t num_tokens(MicroStepId m, RankId source) const override { return num_tokens_(m, source); }
  void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const override {
    tokens_.gather(m, source, l, routes);
  }

 private:
  SourceTokens tokens_;
  Array<std::int64_t, 2> num_tokens_;  // [micro_step][source]
};

class DealtRoutes final : public ReplayRoutes {
 public:
  explicit DealtRoutes(const LoadTable& load)
      : load_(load), num_tokens_(has_short_rows(load) ? load.tokens : tokens_of_fullest_layers(load)) {
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      for (int l = 0; l < load.num_layers(); ++l) {
        for (int s = 0; s < load.num_ranks(); ++s) {
          num_tokens_(m, s) = std::max(num_tokens_(m, s), std::ranges::max(load.load.row(m, l, s)));
        }
      }
    }
  }

  int top_k() const override { return load_.top_k; }
  std::int64_t num_tokens(MicroStepId m, RankId source) const override { return num_tokens_(m, source).value; }

  // The layer's i-th assignment goes to token i mod T, in place i div T. An expert's assignments are consecutive and at
  // most T, so their tokens differ. A layer has at most k·T assignments, so each token receives at most k.
  void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const override {
    const std::int64_t tokens = num_tokens_(m, source).value;
    const std::int64_t k = load_.top_k;
    routes.assign(static_cast<std::size_t>(tokens * k), kUnassigned);
    std::int64_t assignment = 0;
    const auto of_expert = load_.load.row(m, l, source);
    for (std::size_t e = 0; e < of_expert.size(); ++e) {
      for (std::int64_t i = 0; i < of_expert[e].value; ++i, ++assignment) {
        routes[static_cast<std::size_t>(assignment % tokens * k + assignment / tokens)] = ExpertId{e};
      }
    }
  }

 private:
  const LoadTable& load_;
  Array<Tokens, 2> num_tokens_;  // [micro_step][source]
};

}  // namespace

std::unique_ptr<ReplayRoutes> recorded_routes(const RoutingTrace& trace, const Batching& batching) {
  return std::make_unique<RecordedRoutes>(trace, batching);
}

std::unique_ptr<ReplayRoutes> dealt_routes(const LoadTable& load) { return std::make_unique<DealtRoutes>(load); }

std::vector<std::uint8_t> rows_without_route(const ReplayRoutes& routes, const LoadTable& load) {
  const auto layers = static_cast<std::size_t>(load.num_layers());
  std::vector<std::uint8_t> without(static_cast<std::size_t>(load.num_micro_steps()) * layers, 0);
  std::vector<ExpertId> of_source;
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    for (int r = 0; r < load.num_ranks(); ++r) {
      for (int l = 0; l < load.num_layers(); ++l) {
        routes.gather(MicroStepId{m}, RankId{r}, LayerId{l}, of_source);
        if (std::ranges::find(of_source, kNoExpert) != of_source.end()) {
          without[static_cast<std::size_t>(m) * layers + static_cast<std::size_t>(l)] = 1;
        }
      }
    }
  }
  if (std::ranges::count(without, 1) == 0) without.clear();
  return without;
}

}  // namespace foremoe
