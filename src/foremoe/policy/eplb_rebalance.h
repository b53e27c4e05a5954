#pragma once

// EPLB's placement of replicas, as the public reference computes it.
//
// Problem. From what each expert is expected to serve, choose how many replicas it gets and on which rank each of
// them sits, every rank holding equally many, so that the ranks are as evenly loaded as possible when the replicas of
// an expert serve equal parts.
//
// Method. Three steps, each greedy:
//   1. pack groups of experts to nodes, the heaviest first to the lightest node that has room;
//   2. on every node, give the expert whose replicas serve most another one, until there are as many as slots;
//   3. pack the node's replicas to its ranks, in the way of step 1.
// When the groups cannot be divided evenly among the nodes, steps 2 and 3 see all ranks as one node ("global").
// An expert may get several replicas on one rank.
//
// Arithmetic. As in the reference, single precision: sums of weights are exact below 2²⁴.
// Ties. Another replica goes to the expert with the lowest id, an item to the pack with the lowest number. Items of
// equal weight are packed the later one first: the reference sorts by torch.sort, which promises no order among
// equals. This order gives the project's reference figures on all load tables; the earlier one first gives 1.4835
// where they say 1.483 (q30-ep8-bursty) and 1.9077 where they say 1.907 (q30-ep16-bursty).
// Cost. O(replicas · log replicas) per layer.
//
// Source. https://github.com/deepseek-ai/EPLB, rebalance_experts. Its physical_to_logical_map and expert_count on
// integer weights are what the tests compare with; its "GPUs" are our ranks.

#include <cstdint>
#include <optional>
#include <string>

#include "foremoe/core/array.h"

namespace foremoe {

struct EplbShape {
  int num_experts = 0;
  int num_replicas = 0;  // of all experts; a multiple of num_ranks
  int num_ranks = 1;
  int num_nodes = 1;   // must divide num_ranks when it divides num_groups
  int num_groups = 1;  // of consecutive experts, of equal size
};

// Why this shape cannot be placed; nothing when it can.
std::optional<std::string> eplb_obstacle(const EplbShape& shape);

struct EplbPlacement {
  Array<ExpertId, 3> slot_expert;  // [layer][rank][slot], num_replicas / num_ranks slots, none empty
  Array<int, 2> num_replicas;      // [layer][expert], at least 1
};

// `weight` is [layer][expert], tokens, never negative; their unit does not matter. The shape has no obstacle.
EplbPlacement eplb_rebalance(ArrayView<const std::int64_t, 2> weight, const EplbShape& shape);

}  // namespace foremoe
