#pragma once

// Computes the minimum number of tokens above a target, for trials that need only this number.
//
// Problem. Same problem and same minimum as AssignmentSearch::relieve (token_assignment.h). The two may leave different
// tokens above the target. Plans use AssignmentSearch.
//
// Method. Maximum flow by push and relabel: Goldberg, Tarjan, "A new approach to the maximum-flow problem" (J. ACM 35,
// 1988). A rank's label is a lower bound on its distance to a rank with room. Ranks are discharged in FIFO order: each
// pushes its load above the target to ranks with a lower label, and is relabelled if there are none. If no rank has a
// certain label, ranks with higher labels cannot reach room (gap heuristic).
//
// Cost. O(ranks² · slots) in the worst case. Labels start at ranks with room, AssignmentSearch at ranks above the
// target. If most ranks are above it, labels are faster: 2× or more for static guests of 64 ranks with mild loads.

#include <cstdint>
#include <vector>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

class ExcessFlow {
 public:
  // Minimises the number of tokens above `target`, and returns it. Afterwards, every rank that these tokens can reach
  // is at or above the target. Reuses its memory between calls.
  std::int64_t relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment);

 private:
  void label_all(const ReplicaGraph& graph, std::int64_t target, const Assignment& assignment);
  void relabel(int rank, int label);
  void discharge(const ReplicaGraph& graph, std::int64_t target, int rank, Assignment& assignment);

  std::vector<int> label_;         // [rank]; the number of ranks if no room can be reached
  std::vector<int> num_labelled_;  // [label], number of ranks
  std::vector<int> queue_;         // ranks
};

}  // namespace foremoe::planner
