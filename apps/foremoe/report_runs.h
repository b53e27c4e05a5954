#pragma once

// What `report` shows of policies: each planned, its plan proved right, its step simulated.

#include "foremoe/sim/report/report.h"
#include "simulated_policy.h"

namespace foremoe::cli {

struct ReportProblem {
  const PlanningInput& input;
  const SimulationSetup& setup;
  int align = 128;  // tokens
  ThreadPool& pool;
};

struct CheckedSimulation {
  SimulationResult result;  // of a plan that check_plan does not accept: Skipped with what is wrong with it
  bool wrong = false;
};
CheckedSimulation simulate_checked(const ReportProblem& problem, const Policy& policy, const PlannerOptions& options);

// Largest rank load ÷ mean of every (layer, micro-step) with load, [layer] after [layer].
std::vector<double> imbalances(const StepPlan& plan);

// Speedups are over vanilla, which may be the policy itself.
report::PolicyResult figures_of(const SimulatedPolicy& simulated, const SimulatedStep& vanilla);

// Of both phases.
report::NodeTraffic node_traffic(const SimulatedPolicy& simulated);

}  // namespace foremoe::cli
