#pragma once

// Small steps whose modelled times can be computed by hand.

#include "foremoe/sim/simulation.h"
#include "foremoe/testing/simulated_plans.h"

namespace foremoe::sim_test {

inline constexpr double kNear = 1e-9;  // tolerance, for seconds around one

struct Simulated {
  const LoadTable& load;
  const StepPlan& plan;
  CostModel cost;

  SimulatedPhase phase(Phase phase, SimulationOptions options = {}) const {
    options.phase = phase;
    return simulate_phase({.load = load, .plan = plan, .cost = cost}, options);
  }
};

inline CostModel round_cost(int layers, int experts, int ranks_per_node = 2) {
  return {round_cluster(ranks_per_node), round_model(layers, experts), round_options()};
}

// Ranks 0 and 1 have 100 and 40 tokens. Expert 0 (at home on rank 0) has 60 + 30 rows, expert 1 has 40 + 10.
inline LoadTable imbalanced_load() { return one_layer({{{60, 40}, {30, 10}}}); }

// Two micro-steps; all ranks compute 50 rows. In the second micro-step, rank 0 serves 30 rows of expert 1 as a guest.
struct OneCopy {
  LoadTable load = one_layer({{{50, 0}, {0, 50}}, {{20, 30}, {0, 50}}});
  StepPlan plan = homes_plan(load, 1);

  OneCopy() {
    plan.slot_expert(1, 0, 0, 1) = ExpertId{1};
    plan.slot_tokens(1, 0, 0, 1) = Tokens{30};
    plan.slot_tokens(1, 0, 1, 0) = Tokens{50};
  }
};

}  // namespace foremoe::sim_test
