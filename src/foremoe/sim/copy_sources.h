#pragma once

// Chooses the source rank of each peer copy for systems whose copies do not all come from the expert's home
// (OnlineWork; policy/systems/ultraep.h, policy/systems/fastermoe.h).

#include <span>

#include "foremoe/cluster/online_work.h"
#include "foremoe/cluster/topology.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// `copies` must be sorted by `arrives`, with the experts' homes as sources. Copies over the host path stay unchanged.
// Does nothing if `choose` is null.
void choose_sources(ChooseSources choose, const Topology& topology, std::span<ScheduledCopy> copies);

}  // namespace foremoe
