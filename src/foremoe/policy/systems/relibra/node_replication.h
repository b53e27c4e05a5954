#pragma once

// ReLibra inside a batch: replicas on the ranks of one node for one layer of one micro-step.
//
// Problem. A MILP: choose which rank holds a replica of which of the node's experts, at most guest_slots besides its
// homes, and how many tokens each replica serves, so that the most loaded rank of the node serves as few as possible.
// What the node's experts serve altogether is given by their homes: nothing leaves the node.
//
// Method. An incremental greedy on the most loaded rank.
//   1. While it is above the node's ⌈mean⌉: of its experts and the ranks below the mean that hold the expert or have a
//      free slot, take the pair that can move most tokens without taking either rank past the mean; one that needs no
//      new replica before one that does, then the lowest ids.
//   2. When none can move, what the replicas placed so far serve is solved exactly (planner/token_assignment.h): with
//      the placement fixed the MILP is FineMoE's LP 1.
//   3. Still above the mean, the most loaded rank gets one new replica of the expert that can move most tokens to a
//      rank with a free slot until the two are level; then again from 1. The end when there is none.
//
// Inferred. "A MILP over placement and token split, solved by incremental greedy" is all that is known to us: what an
// increment is and the exact split are ours; so is that tokens alone count, not communication, which inside a node is
// cheap.
//
// Guarantee. None but that it never raises the largest load; the test tells how far it is from the optimum in small
// cases. Cost. O(increments · homes · ranks of the node) and an exact split for each replica of step 3.

#include <cstdint>
#include <vector>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::relibra {

struct NodeLoad {
  int num_ranks = 1;
  int guest_slots = 0;             // per rank
  std::vector<int> home;           // [expert], rank, both counted within the node; equally many on each
  std::vector<std::int64_t> load;  // [expert], tokens
};

struct NodeReplicas {
  planner::ReplicaGraph graph;  // homes in the first slots of their rank
  planner::Assignment assignment;
};

// A guest may be left without quota.
NodeReplicas replicate_in_node(const NodeLoad& node, planner::AssignmentSearch& search);

}  // namespace foremoe::relibra
