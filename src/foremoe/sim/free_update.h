#pragma once

// What the policy update of a plan of residency `free` would copy.
//
// Such a plan is forward-only in execution (transfer/turn_order.h refuses its backward): an expert away from its home
// has nobody to keep its gradient. What it would cost in training is asked all the same, so the leases that recompute
// has are stretched: a replica that serves a micro-step's forward stays until that micro-step's backward is done, and
// the next one may come after that. Homes are not copied back: the optimizer writes them anew. And where recompute ran
// by the same plan, it need not copy homes back either: the policy update begins with the placement that it leaves.

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct FreeUpdateOptions {
  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;
  bool after_recompute = false;  // begin with the placement of the plan's last event, not with homes
};

// Throws InputError for a plan of more than one micro-step in flight.
TransferSchedule free_update_schedule(const StepPlan& plan, const ExpertLayout& layout,
                                      const FreeUpdateOptions& options);

// Takes from a recompute's schedule the copies that bring homes back at its end.
void leave_placement(TransferSchedule& schedule, const StepPlan& plan);

}  // namespace foremoe
