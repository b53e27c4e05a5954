#pragma once

// The planner: from a step's loads to a plan, by four stages per layer (see docs/developers/algorithms.md).
//
// clang-format off
//   B  base placement    once per step      homes (with `rehome`) and the guests that the step begins with
//   L  relocation        every micro-step   whole experts; runs where P is off, and under `free` after P
//   P  replication       every micro-step   guests at the bottleneck: the tight set of ranks
//   T  token assignment  every micro-step   optimal integer quotas, with their certificate
// clang-format on
//
// Layers are independent and run in parallel; the result does not depend on the number of threads.

#include <functional>
#include <string>

#include "foremoe/core/parallel.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/planner/planner_options.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct PlanTimes {
  double wall_seconds = 0;
  double base_cpu_seconds = 0;      // what is done once per step: stage B. Summed over threads
  double planning_cpu_seconds = 0;  // everything else, summed over threads
  // [layer] CPU seconds: what is done once, what else before the first micro-step can begin, and what after that.
  std::vector<double> once_of_layer = {};
  std::vector<double> first_of_layer = {};
  std::vector<double> later_of_layer = {};
};

struct PlanRequest {
  const LoadTable& load;
  ArrayView<const RankId, 2> home;  // [layer][expert], before any rehoming; E/R experts on each rank
  PlannerOptions options;
  const StepPlan* previous = nullptr;  // warm start: a former step's plan of the same shape
  // Called once per micro-step, in order, when the plan of all its layers is final. Slots are from the first call on,
  // but under `shared`, where each micro-step's are final with its quotas. May be empty.
  std::function<void(const StepPlan&, MicroStepId)> on_micro_step = {};
};

struct PlannedStep {
  StepPlan plan;
  PlanTimes times;
};

// Homes in contiguous blocks: expert e lives on rank e / (E/R). [layer][expert]. Throws InputError unless num_ranks
// divides num_experts.
Array<RankId, 2> contiguous_homes(int num_layers, int num_experts, int num_ranks);

// Throws InputError, field `homes` with its index, unless each rank is home to E/R experts of every layer of the load.
void expect_homes(ArrayView<const RankId, 2> home, const LoadTable& load);

// Throws InputError whose field is that of PlanRequest or PlannerOptions ("homes", "guest_slots", …), or "load" in the
// file of the load.
PlannedStep plan_step(const PlanRequest& request, ThreadPool& pool);

// The same with contiguous homes and as many threads as there are processors.
PlannedStep plan_step(const LoadTable& load, const PlannerOptions& options = {});

// Stage T alone: the slots of `plan` with the quotas that `load` asks for, which need not be the load that they were
// chosen for. So splits who places by a forecast and learns at the router what comes. Under `shared` a guest without
// tokens leaves its slot. Throws InputError, field `load`, for a load of another size.
StepPlan split_anew(StepPlan plan, const LoadTable& load);

}  // namespace foremoe
