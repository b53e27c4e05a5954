#pragma once

// Plans with a policy and measures how long the step waits for placement. docs/users/simulation.md gives the rule.

#include <optional>
#include <span>
#include <string>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// Processes that plan a step. Each plans some of the model's layers; each thread plans one layer at a time.
struct Planners {
  int count = 1;
  int threads = 1;            // per planner
  double gather_seconds = 0;  // to gather the parts of several planners
};

// Returns the seconds of the slowest planner plus the gather, or of one planner for all layers if that is less.
// of_layer: CPU seconds per layer of the workload. Each workload layer represents the same number of model layers.
double planning_seconds(std::span<const double> of_layer, int model_layers, const Planners& planners);

inline constexpr int kPlanningRuns = 3;  // on a busy machine one run can take several times as long

struct MeasuredPlan {
  PlannedStep step;
  // CPU seconds from the start of planning until the first micro-step can begin. With a cost model, uses the shortest
  // of all runs per layer. 0 if the policy does not plan ahead.
  double placement_seconds = 0;
  // CPU seconds until all micro-steps are placed. Charged under `shared` if copies come from host memory, since an
  // arena is filled with the experts of the whole phase.
  double whole_placement_seconds = 0;
};

struct PlanningOptions {
  PlannerOptions planner;
  Planners planners;
  int runs = kPlanningRuns;
};

// Returns nullopt, and the reason in `why_not`, if the policy is not defined for the workload.
std::optional<MeasuredPlan> plan_measured(const Policy& policy, const Workload& workload,
                                          const PlanningOptions& options, const EvaluationContext& context,
                                          std::string& why_not);

}  // namespace foremoe
