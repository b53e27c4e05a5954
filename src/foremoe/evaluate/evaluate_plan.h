#pragma once

// What a plan is worth that is there already: one that a trainer executes, or one on a load that it was not made for,
// since plans are made of recorded routes and a router may take others.

#include <optional>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// The plan's slots with other quotas: slot_tokens [event][layer][rank][slot], for the load that they sum to. Throws
// InputError, field `slot_tokens`, for another shape.
StepPlan with_quotas(StepPlan plan, Array<Tokens, 4> slot_tokens, const LoadTable& load);

// Of the policy update; recompute's where that has one of its own, as it must have for a step to be simulated where the
// policy update has more than one micro-step in flight.
struct PlansOfStep {
  StepPlan policy_update;
  std::optional<StepPlan> recompute = {};
};

// As evaluate() does, of plans that are there. `policy` says what is done online. Throws InputError, field
// `recompute_plan`, where it is missing, or has more than one micro-step in flight.
Evaluation evaluate_plan(const Policy& policy, PlansOfStep plans, const Workload& workload,
                         const EvaluateOptions& options, const EvaluationContext& context);

}  // namespace foremoe
