#pragma once

// How many tokens must stay above a target: for trials, of which nothing else is asked.
//
// Problem. That of AssignmentSearch::relieve (token_assignment.h), whose number it finds. Which tokens stay may differ,
// and plans are made from those that relieve() leaves.
//
// Method. Maximum flow by push and relabel: Goldberg, Tarjan, "A new approach to the maximum-flow problem" (J. ACM 35,
// 1988). A rank's label is at most its distance from a rank with room. What it has above the target goes to ranks with
// a lower label, first come, first served; where there is none it is labelled anew. A label that nobody has any more
// parts all ranks with a higher one from every room.
//
// Cost. O(ranks² · slots) at worst. Labels begin at the ranks with room, searches at those above the target: where most
// ranks are above it, this is quicker. Static guests of 64 ranks with mild loads take half the time or less.

#include <cstdint>
#include <vector>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

class ExcessFlow {
 public:
  // Moves tokens until as few as possible are above `target`; returns those. Every rank that tokens of theirs could
  // still go to is then at the target or above. Keeps its memory from call to call.
  std::int64_t relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment);

 private:
  void label_all(const ReplicaGraph& graph, std::int64_t target, const Assignment& assignment);
  void relabel(int rank, int label);
  void discharge(const ReplicaGraph& graph, std::int64_t target, int rank, Assignment& assignment);

  std::vector<int> label_;         // [rank]; the number of ranks: parted from every room
  std::vector<int> num_labelled_;  // [label], ranks
  std::vector<int> queue_;         // ranks
};

}  // namespace foremoe::planner
