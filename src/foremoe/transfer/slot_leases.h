#pragma once

// Computes the copies into a plan's slots and the turns that read them, for every residency except `shared`, where no
// guest stays.
//
// An expert is copied if its slot did not contain it at the previous event. The lease of a copy covers the first to the
// last turn that reads it in this slot. The slot is free from the turn after the last reader of the previous lease.
// Under `free`, overwritten homes are restored after the last turn, unless `leaves_last_placement`. If the phase begins
// with the last placement of the previous phase, experts already in their slots need no copy.

#include <vector>

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct SlotLeases {
  std::vector<ScheduledCopy> copies;       // by layer, rank; without path and source
  std::vector<ScheduledCopy> from_before;  // leases of experts already in place, which need no copy; as above
};

// Throws InputError, field `slot_expert`, if an expert changes its slot or replaces a pinned home.
SlotLeases slot_leases(const StepPlan& plan, const TurnOrder& order, const ScheduleOptions& options);

}  // namespace foremoe
