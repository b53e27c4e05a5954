#include "foremoe/policy/laer.h"

#include <algorithm>
#include <functional>

#include "foremoe/core/error.h"
#include "foremoe/policy/former_step.h"
#include "foremoe/policy/free_plan.h"

namespace foremoe {

namespace {

// Adds the load of some micro-steps of one layer to `sum`, [source rank][expert].
void add(const LoadTable& load, int first, int end, LayerId layer, Array<std::int64_t, 2>& sum) {
  for (int m = std::max(0, first); m < end; ++m) {
    std::ranges::transform(load.load.view()[m][layer].flat(), sum.flat(), sum.flat().begin(),
                           [](Tokens tokens, std::int64_t so_far) { return tokens.value + so_far; });
  }
}

class Laer final : public Policy {
 public:
  Laer(std::string_view name, std::string_view summary, const LaerOptions& options)
      : name_(name), summary_(summary), options_(options) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable* former = former_load(input);
    if (former != nullptr && former->num_ranks() != input.load.num_ranks()) {
      throw InputError({.file = former->name, .field = "load"}, "must be of as many ranks as the load that is planned");
    }
    std::vector<Array<ExpertId, 3>> layouts(input.load.load.extent(1));  // [layer]
    FreePolicy policy{.name = name(), .place = {}};
    policy.place = [&](LayerId layer, ArrayView<const std::int64_t, 2>) {
      layouts[layer.index()] = lay_out(input, layer);
      return layouts[layer.index()];
    };
    policy.own_split = [&](LayerId layer) -> SplitTokens {
      return [&input, &layout = layouts[layer.index()], layer](MicroStepId m, const planner::ReplicaGraph& graph,
                                                               std::span<const std::int64_t>,
                                                               planner::Assignment& assignment) {
        Array<std::int64_t, 2> by_source({input.load.load.extent(2), input.load.load.extent(3)});
        add(input.load, m.value, m.value + 1, layer, by_source);
        const laer::Routed routed = laer::route_inside_first(by_source, layout[m], input.load.topology());
        assignment.quota.assign(graph.num_slots(), 0);
        assignment.rank_load.assign(graph.num_ranks(), 0);
        for (int s = 0; s < graph.num_slots(); ++s) {
          if (graph.expert_in(s) < 0) continue;
          assignment.quota[s] = routed.served(graph.rank_of(s), graph.expert_in(s));
          assignment.rank_load[graph.rank_of(s)] += assignment.quota[s];
        }
      };
    };
    return plan_freely(policy, input, pool);
  }

 private:
  // [micro_step][rank][slot]
  Array<ExpertId, 3> lay_out(const PolicyInput& input, LayerId layer) const {
    const LoadTable& load = input.load;
    const laer::Shape shape{.topology = load.topology(),
                            .slots_per_rank = load.num_experts() / load.num_ranks() + input.options.guest_slots};
    Array<ExpertId, 3> layouts(
        {load.load.extent(0), load.load.extent(2), static_cast<std::size_t>(shape.slots_per_rank)});
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      const Array<ExpertId, 2> layout = laer::best_layout(expected(input, layer, m), shape, options_.prices);
      std::ranges::copy(layout.flat(), layouts[m].flat().begin());
    }
    return layouts;
  }

  // [source rank][expert], tokens; sums, since the layout does not ask for the unit.
  Array<std::int64_t, 2> expected(const PolicyInput& input, LayerId layer, int m) const {
    const LoadTable& load = input.load;
    Array<std::int64_t, 2> sum({load.load.extent(2), load.load.extent(3)});
    if (options_.history == 0) {
      add(load, m, m + 1, layer, sum);
    } else if (const LoadTable* former = input.previous_load; former != nullptr) {
      add(load, m - options_.history, m, layer, sum);
      const int missing = std::max(0, options_.history - m);
      add(*former, former->num_micro_steps() - missing, former->num_micro_steps(), layer, sum);
    } else {
      add(load, m > 0 ? m - options_.history : 0, m > 0 ? m : load.num_micro_steps(), layer, sum);
    }
    return sum;
  }

  std::string_view name_;
  std::string_view summary_;
  LaerOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_laer(const LaerOptions& options) {
  return std::make_unique<Laer>(
      "laer", "LAER-MoE: experts laid out anew for every micro-step by the last ones, tokens kept on their node",
      options);
}

std::unique_ptr<Policy> make_laer_oracle(const LaerOptions& options) {
  LaerOptions oracle = options;
  oracle.history = 0;
  return std::make_unique<Laer>("laer-oracle", "LAER-MoE in every micro-step by its own load", oracle);
}

}  // namespace foremoe
