#pragma once

// What placement costs: a policy's plan, and how long the step waits for it. docs/users/simulation.md has the rule.

#include <optional>
#include <span>
#include <string>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// Who plans a step: each planner some of the model's layers, one after the other on each of its threads.
struct Planners {
  int count = 1;
  int threads = 1;            // of each
  double gather_seconds = 0;  // that it takes to gather the parts of several planners
};

// How long the slowest planner and the gather take; or how long one planner takes for all layers, if that is less.
// of_layer: CPU seconds of each layer of the input, each of which stands for as many of the model's.
double planning_seconds(std::span<const double> of_layer, int model_layers, const Planners& planners);

struct MeasuredPlan {
  PlannedStep step;
  // From the beginning of planning until the first micro-step can begin, by CPU time: for each layer the least of three
  // runs where there is a cost model. 0 where the policy does not plan ahead.
  double placement_seconds = 0;
  // The same until all micro-steps are placed: what a step waits for under `shared` where copies come from host memory,
  // whose arenas hold what the whole phase fetches.
  double whole_placement_seconds = 0;
};

struct PlanningOptions {
  PlannerOptions planner;
  Planners planners;
};

// Nothing where the policy is not defined for the input; `why_not` then says why.
std::optional<MeasuredPlan> plan_measured(const Policy& policy, const Workload& workload,
                                          const PlanningOptions& options, const EvaluationContext& context,
                                          std::string& why_not);

}  // namespace foremoe
