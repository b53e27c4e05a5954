#pragma once

// The copies of a plan of residency `free` that come from peers.
//
// Problem. Any slot may be overwritten, homes too. So an expert comes from whichever rank holds it, that rank must keep
//   it until it has been read, and ranks that exchange experts read from each other what each is to overwrite.
// Method. A copy arrives in a staging buffer. When all ranks have agreed that a turn's copies have arrived, nobody
//   reads what they replace, and each rank moves its own from staging into their slots. Engines that place experts
//   freely do the same with a buffer for each slot of one layer. Here there are `depth` sets of as many buffers as a
//   rank has copies at any turn; turn t uses set t mod depth. After the order's last turn homes come back layer by
//   layer, those of layer l at the l-th turn that follows, so that the same buffers serve them.
// Sources. Among the ranks whose slots hold the expert: one on the same node first, then the one that sends fewest
//   copies of the turn, then the lowest. A copy opens when its set is free and after the turn at which its source got
//   the expert.
// Complexity. O(events · layers · ranks · slots).

#include <vector>

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct StagingOptions {
  int depth = kDefaultDepth;
  // For phases that follow each other by the same plan (the simulation's alone): slots hold what its last event had
  // there, not homes; and what they hold at the end stays.
  bool begin_with_last_placement = false;
  bool bring_homes_back = true;
};

struct StagedCopies {
  std::vector<ScheduledCopy> copies;  // by arrives, rank, slot
  int buffers = 0;                    // of a rank, behind its slots
};

// Throws InputError, field `slot_expert`, where an expert changes its slot and where no rank holds it before an event.
StagedCopies staged_copies(const StepPlan& plan, const TurnOrder& order, const StagingOptions& options);

}  // namespace foremoe
