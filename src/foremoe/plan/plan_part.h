#pragma once

// The first part of a plan, where less than the whole step is executed or drawn.

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

// The part of `plan` that is for `part`, itself the first micro-steps and layers of the load that `plan` is for, as
// take_first() of load_table.h makes it: the events of those micro-steps in the plan's order, in each the first layers.
// Slots, quotas [tokens], homes, largest loads and bounds are the plan's, empty where its are; the digest is that of
// `part`. Of a plan that check_plan accepts it accepts the part. No more micro-steps and layers than the plan has;
// throws nothing.
StepPlan take_first(const StepPlan& plan, const LoadTable& part);

}  // namespace foremoe
