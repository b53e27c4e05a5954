#pragma once

// What travels where every expert is sharded over all ranks, as ZeRO-3 shards weights (OnlineWork::shards_experts).
//
// Model. Before each pass of a layer, forward or backward, a rank gathers the experts of its slots: of each, an equal
//   part from every rank. It may begin `depth` − 1 turns ahead, for there are `depth` sets of buffers for whole
//   experts. After a backward pass their gradients are scattered to all ranks, which add them up; a set of them must be
//   gone when the backward that uses it next begins, else by the end of the phase. What is gathered is dropped after
//   the pass.
// Traffic. Each rank sends as much as it receives. So a gather is modelled as if all parts from the rank's own node
//   came from the next rank there, and all others from the rank at its position on the next node. Links carry what they
//   would, and each gather has one latency inside and one between nodes.

#include <vector>

#include "foremoe/sim/phase_transfers.h"

namespace foremoe {

// In turns; `expert` of each is kNoExpert.
struct ShardedTransfers {
  std::vector<Transfer> transfers;
  std::int64_t gathered = 0;  // experts
};
ShardedTransfers sharded_transfers(const SimulationInput& input, const TurnOrder& order, int depth);

}  // namespace foremoe
