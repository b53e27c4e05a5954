#pragma once

// Planner: computes a step's plan from its loads, in four stages per layer (see docs/developers/algorithms.md).
//
// clang-format off
//   B  base placement    once per step      homes (with `rehome`) and the initial guests of the step
//   L  relocation        every micro-step   moves of whole experts; runs if P is off, and under `free` after P
//   P  replication       every micro-step   guests at the bottleneck: the tight set of ranks
//   T  token assignment  every micro-step   optimal integer quotas, with their certificate
// clang-format on
//
// Layers are independent and run in parallel; the result does not depend on the number of threads.

#include <functional>
#include <span>
#include <string>

#include "foremoe/core/parallel.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/planner/planner_options.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct PlanTimes {
  double wall_seconds = 0;
  double base_cpu_seconds = 0;      // stage B, once per step; summed over threads
  double planning_cpu_seconds = 0;  // all other stages, summed over threads
  // [layer], CPU seconds: once per step, before the first micro-step can begin, and for later micro-steps.
  std::vector<double> once_of_layer = {};
  std::vector<double> first_of_layer = {};
  std::vector<double> later_of_layer = {};
};

struct PlanRequest {
  const LoadTable& load;
  ArrayView<const RankId, 2> home;  // [layer][expert], before any rehoming; E/R experts on each rank
  PlannerOptions options = {};
  const StepPlan* previous = nullptr;  // warm start: the previous step's plan, of the same shape
  // Called for each micro-step in order, once the plan of all its layers is final. Except under `shared`, the slots of
  // all micro-steps are final at the first call. May be empty.
  std::function<void(const StepPlan&, MicroStepId)> on_micro_step = {};
};

struct PlannedStep {
  StepPlan plan;
  PlanTimes times;
};

// Homes [layer][expert] in contiguous blocks, as LoadTable::contiguous_home() defines them. Throws InputError unless
// num_ranks divides num_experts and the experts of every layer.
Array<RankId, 2> contiguous_homes(int num_layers, int num_experts, int num_ranks,
                                  std::span<const int> experts_of_layer = {});
Array<RankId, 2> contiguous_homes(const LoadTable& load);

// As expect_homes() in step_plan.h, and requires the load's layers and experts.
void expect_homes(ArrayView<const RankId, 2> home, const LoadTable& load);

// Throws InputError. The error's field is a field of PlanRequest or PlannerOptions ("homes", "guest_slots", …), or
// "load", with the name of the load's file.
PlannedStep plan_step(const PlanRequest& request, ThreadPool& pool);

// As above, with contiguous homes and one thread per processor.
PlannedStep plan_step(const LoadTable& load, const PlannerOptions& options = {});

// Stage T alone: keeps the slots of `plan` and computes quotas for `load`, which may differ from the load that the
// slots were chosen for. Models systems that place experts by a forecast and split tokens at the router. Under
// `shared`, removes guests without tokens. Throws InputError, field `load`, if the shape differs from the plan's.
StepPlan recompute_quotas(StepPlan plan, const LoadTable& load);

}  // namespace foremoe
