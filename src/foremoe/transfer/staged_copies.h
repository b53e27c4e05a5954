#pragma once

// Copies from peers for a plan of residency `free`.
//
// Problem. Any slot may be overwritten, including homes. A copy therefore reads from any rank that has the expert, and
//   must do so before that rank overwrites it. Ranks may also exchange experts.
// Method. A copy arrives in a staging buffer. Once all ranks agree that a turn's copies have arrived, no rank reads the
//   slots that they replace, and each rank moves its copies from staging to these slots. Other engines with free
//   placement use one buffer per slot of one layer. This schedule uses `depth` + 1 sets of buffers, so that copies may
//   start `depth` turns ahead. A set has one buffer for each copy of a rank at its busiest turn. Turn t uses set t mod
//   (depth + 1). After the last turn of the order, homes return through the same buffers, one layer per turn: layer l
//   at turn order.size() + l.
// Sources. Among the ranks with the expert, prefers the rank itself, then a rank on its node, then the rank that sends
//   the fewest copies of the turn, then the lowest rank. A copy opens once its set of buffers is free, but only after
//   the turn at which its source got the expert.
// Complexity. O(events · layers · ranks · slots + copies · holders of their experts).

#include "foremoe/transfer/slot_leases.h"

namespace foremoe {

// Sets the copies' sources, path and staging buffers, and sorts them by arrives, rank, slot. Returns the number of
// staging buffers per rank, which follow its slots. Throws InputError, field `slot_expert`, if an expert is on no rank
// before an event.
int stage_copies(const StepPlan& plan, const TurnOrder& order, const ScheduleOptions& options, SlotLeases& leases);

}  // namespace foremoe
