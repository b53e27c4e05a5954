#pragma once

// ReLibra within a batch: replicas on the ranks of one node, for one layer of one micro-step.
//
// Problem. A MILP: choose at most guest_slots of the node's experts that each rank replicates, and the tokens that each
// replica serves. Minimise the load of the node's most loaded rank. No token leaves the node, so homes fix the node's
// total load.
//
// Method. An incremental greedy algorithm on the most loaded rank.
//   1. While the rank is above the node's ⌈mean⌉, pair its experts with ranks below the mean that hold the expert or
//      have a free slot. Choose the pair that can move the most tokens without moving either rank past the mean. Ties
//      prefer pairs without a new replica, then the lowest ids.
//   2. If no pair can move tokens, solve the split over the placed replicas exactly (planner/token_assignment.h): for a
//      fixed placement the MILP is FineMoE's LP 1.
//   3. If the most loaded rank is still above the mean, add one replica of the expert that can move the most tokens to
//      a rank with a free slot until the two are level. Repeat from 1; end if there is no such expert.
//
// Inferred. We know only "a MILP over placement and token split, solved by incremental greedy". We chose the
// increments, the exact split, and an objective that ignores communication (cheap inside a node).
//
// Guarantee. The largest load never rises. The distance from the optimum has no bound. The test measures it in small
// cases. Complexity. O(increments · homes · ranks of the node), and one exact split per replica of step 3.

#include <cstdint>
#include <vector>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::relibra {

struct NodeLoad {
  int num_ranks = 1;
  int guest_slots = 0;             // per rank
  std::vector<int> home;           // [expert], rank, both numbered within the node; equally many per rank
  std::vector<std::int64_t> load;  // [expert], tokens
};

struct NodeReplicas {
  planner::ReplicaGraph graph;  // homes in the first slots of their rank
  planner::Assignment assignment;
};

// A guest may have quota 0.
NodeReplicas replicate_in_node(const NodeLoad& node, planner::AssignmentSearch& search);

}  // namespace foremoe::relibra
