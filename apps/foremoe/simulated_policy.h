#pragma once

// A policy planned and its step simulated: what `simulate` prints one of for each policy, and what `report` and
// `reproduce` draw. Vanilla is the step that speedups are over, so it is simulated first, asked for or not.

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "foremoe/core/timeline.h"
#include "foremoe/sim/simulation.h"
#include "measured_plan.h"

namespace foremoe::cli {

struct SimulationSetup {
  const CostModel& cost;  // its ranks per node are those that the input is planned for
  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;           // turns
  double rollout_seconds = 0;          // of the RL step
  std::optional<Bytes> memory_budget;  // of one rank
  bool choose_residency = false;       // --residency auto: the quickest within the budget, for policies that have one
  Timeline* timeline = nullptr;        // of the policy update; of one policy: the last that is not skipped
};

struct SimulatedPolicy {
  std::string policy;
  MeasuredPlan measured;                   // the policy update's; also recompute's where that is null
  std::optional<StepPlan> recompute_plan;  // its own where the policy update has more than one micro-step in flight
  SimulatedStep step;
  double speedup_over_vanilla = 1;
  double rl_step_speedup = 1;                        // with the rollout, which takes as long whoever plans
  std::optional<Tokens> largest_micro_batch_tokens;  // per rank in the mean, where there is a memory budget

  double fraction_of_ideal() const { return step.ideal_step_seconds / step.step_seconds; }
};

using SimulationResult = std::variant<SimulatedPolicy, Skipped>;

// 1 of a step that takes no time.
double speedup(double before_seconds, double after_seconds);

// Plans once per phase where the policy update has more than one micro-step in flight. The speedups stay 1.
SimulationResult simulate_policy(const MeasureProblem& problem, const SimulationSetup& setup, ThreadPool& pool);

struct SimulatedRow {
  std::string policy;
  SimulationResult result;

  const SimulatedPolicy* get() const { return std::get_if<SimulatedPolicy>(&result); }  // null: skipped
};

// One row per policy, in their order, speedups filled in.
struct SimulationRequest {
  const PlanningInput& input;
  PlannerOptions options;
  int align = 128;  // tokens
};
std::vector<SimulatedRow> simulate_policies(const std::vector<const Policy*>& policies,
                                            const SimulationRequest& request, const SimulationSetup& setup,
                                            ThreadPool& pool);

// The keys that docs/formats.md lists, in that order: those of `compare`, then those of the simulation.
nlohmann::ordered_json to_json(const SimulatedRow& row);
nlohmann::ordered_json to_json(const SimulatedPhase& phase);

}  // namespace foremoe::cli
