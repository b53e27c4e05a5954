#pragma once

// The copies of a plan of residency `free` that come from peers.
//
// Problem. Any slot may be overwritten, homes too. So an expert comes from whichever rank holds it, that rank must keep
//   it until it has been read, and ranks that exchange experts read from each other what each is to overwrite.
// Method. A copy arrives in a staging buffer. When all ranks have agreed that a turn's copies have arrived, nobody
//   reads what they replace, and each rank moves its own from staging into their slots. Engines that place experts
//   freely do the same with a buffer for each slot of one layer. Here there are `depth` + 1 sets of as many buffers as
//   a rank has copies at any turn, so that copies may start `depth` turns ahead; turn t uses set t mod (depth + 1).
//   After the order's last turn homes come back layer by layer, those of layer l at the l-th turn that follows, so that
//   the same buffers serve them.
// Sources. Among the ranks whose slots hold the expert: one on the same node first, then the one that sends fewest
//   copies of the turn, then the lowest. A copy opens when its set is free and after the turn at which its source got
//   the expert.
// Complexity. O(events · layers · ranks · slots).

#include "foremoe/transfer/slot_leases.h"

namespace foremoe {

// Gives copies their sources, the path of peers and staging buffers, and puts them in order: by arrives, rank, slot.
// Returns how many staging buffers a rank has, behind its slots. Throws InputError, field `slot_expert`, where no rank
// holds an expert before an event.
int stage_copies(const StepPlan& plan, const TurnOrder& order, const ScheduleOptions& options, SlotLeases& leases);

}  // namespace foremoe
