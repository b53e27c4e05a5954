#pragma once

// The planner: from a step's loads to a plan, by four stages per layer (see docs/algorithms.md).
//
//   B  base placement   per step         homes (with `rehome`) and the guests that the step begins with
//   L  relocation       per micro-step   a guest serves the whole quota and home rests; where P is off, and under
//   `free` P  replication      per micro-step   guests where the tight set of ranks says T  token assignment per
//   micro-step   exact quotas with their certificate
//
// Layers are independent and run in parallel; the result does not depend on the number of threads.

#include <functional>

#include "foremoe/core/parallel.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/planner/planner_options.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct PlanTimes {
  double wall_seconds = 0;
  double base_cpu_seconds = 0;      // stage B, summed over threads
  double planning_cpu_seconds = 0;  // everything but stage B, summed over threads
};

struct PlanRequest {
  const LoadTable& load;
  ArrayView<const RankId, 2> home;  // [layer][expert], before any rehoming; E/R experts on each rank
  PlannerOptions options;
  const StepPlan* previous = nullptr;  // warm start: a former step's plan of the same shape
  // Called once per micro-step, in order, when the plan of all its layers is final. May be empty.
  std::function<void(const StepPlan&, MicroStepId)> on_micro_step = {};
};

struct PlannedStep {
  StepPlan plan;
  PlanTimes times;
};

// Homes in contiguous blocks: expert e lives on rank e / (E/R). [layer][expert]. Throws InputError unless R divides E.
Array<RankId, 2> contiguous_homes(int num_layers, int num_experts, int num_ranks);

PlannedStep plan_step(const PlanRequest& request, ThreadPool& pool);

// The same with contiguous homes and as many threads as there are processors.
PlannedStep plan_step(const LoadTable& load, const PlannerOptions& options = {});

}  // namespace foremoe
