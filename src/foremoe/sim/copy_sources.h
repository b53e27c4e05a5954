#pragma once

// From which rank each peer copy comes, where not all of an expert's come from its home: as the system's OnlineWork
// says (policy/systems/ultraep.h, policy/systems/fastermoe.h).

#include <span>

#include "foremoe/policy/online_work.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// Copies come by `arrives`, with their experts' homes as sources; those over the host path are left as they are.
// Nothing is chosen where `choose` is null.
void choose_sources(ChooseSources choose, int num_ranks, std::span<ScheduledCopy> copies);

}  // namespace foremoe
