#pragma once

// Evaluates an existing plan, for example one that a trainer executes. The load may differ from the load that was
// planned, since a router may choose other routes than the recorded ones.

#include <optional>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// Replaces the plan's quotas. slot_tokens, [event][layer][rank][slot], must sum to the load. Throws InputError, field
// `slot_tokens`, for another shape.
StepPlan with_quotas(StepPlan plan, Array<Tokens, 4> slot_tokens, const LoadTable& load);

// The plans of a step. If the policy update has more than one micro-step in flight, simulating the step requires a plan
// for recompute.
struct PlansOfStep {
  StepPlan policy_update;
  std::optional<StepPlan> recompute = {};
};

// Like evaluate(), for existing plans. `policy` determines the online work. Throws InputError, field `recompute_plan`,
// if the required recompute plan is missing or has more than one micro-step in flight.
Evaluation evaluate_plan(const Policy& policy, PlansOfStep plans, const Workload& workload,
                         const EvaluateOptions& options, const EvaluationContext& context);

}  // namespace foremoe
