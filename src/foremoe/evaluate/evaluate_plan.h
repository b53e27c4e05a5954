#pragma once

// What a plan is worth on a load that it was not made for: plans are made of recorded routes, and a router may take
// others.

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// The plan's slots with other quotas: slot_tokens [event][layer][rank][slot], for the load that they sum to. Throws
// InputError, field `slot_tokens`, for another shape.
StepPlan with_quotas(StepPlan plan, Array<Tokens, 4> slot_tokens, const LoadTable& load);

// As evaluate() does, of a plan that is there. `policy` says what is done online. Throws InputError, field `plan`, of
// more than one micro-step in flight.
Evaluation evaluate_plan(const Policy& policy, StepPlan plan, const StepInput& input, const EvaluateOptions& options,
                         const EvaluationContext& context);

}  // namespace foremoe
