#pragma once

// Transfers of experts that are sharded over all ranks, as ZeRO-3 shards weights (OnlineWork::shards_experts).
//
// Model. Before each forward or backward pass of a layer, a rank gathers the experts of its slots, an equal part from
//   every rank. A gather may begin `depth` − 1 turns ahead, since there are `depth` sets of buffers for whole experts.
//   After a backward pass the gradients are reduce-scattered to all ranks; a set of gradient buffers must be free when
//   its next backward begins, all sets at the end of the phase. Gathered experts are dropped after the pass.
// Traffic. Each rank sends and receives equal bytes. A gather is modelled as if all parts from the rank's own node came
//   from the node's next rank, and all others from the rank at the same position on the next node. Links carry the same
//   bytes as in the real collective, and each gather has one latency within and one between nodes.

#include <vector>

#include "foremoe/sim/phase_transfers.h"

namespace foremoe {

// The `expert` of each transfer is kNoExpert.
struct ShardedTransfers {
  std::vector<Transfer> transfers;
  std::int64_t gathered = 0;  // number of experts
};
ShardedTransfers sharded_transfers(const SimulationInput& input, const TurnOrder& order, int depth);

}  // namespace foremoe
