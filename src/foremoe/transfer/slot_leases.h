#pragma once

// What must be brought into the slots of a plan, and which turns read it there. Every residency but `shared`, under
// which nothing stays.
//
// An expert is brought where its slot did not hold it at the event before, and leased from the first turn that reads
// it there to the last. The slot is free from the turn after the former lease's last reader. Under `free`, homes that
// were overwritten are brought back after the last turn, unless the last placement is to stay; where it has stayed
// from a former phase, an expert that is on the rank needs no copy.

#include <vector>

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct SlotLeases {
  std::vector<ScheduledCopy> copies;       // by layer, rank; without path and source
  std::vector<ScheduledCopy> from_before;  // likewise; what is there already
};

// Throws InputError, field `slot_expert`, where an expert changes its slot or displaces a pinned home.
SlotLeases slot_leases(const StepPlan& plan, const TurnOrder& order, const ScheduleOptions& options);

}  // namespace foremoe
