#pragma once

// What the policy update of a plan of residency `free` would copy.
//
// Such a plan is forward-only in execution (transfer/turn_order.h refuses its backward): an expert away from its home
// has nobody to keep its gradient. What it would cost in training is asked all the same, so the leases that recompute
// has are stretched: a replica that serves a micro-step's forward stays until that micro-step's backward is done, and
// the next one may come after that. Homes are not copied back: the optimizer writes them anew.

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// Throws InputError for a plan of more than one micro-step in flight. `options.stage` is not read.
TransferSchedule free_update_schedule(const StepPlan& plan, const ExpertLayout& layout, const ScheduleOptions& options);

}  // namespace foremoe
