#pragma once

// Local guests, for Prefer::kLinks: guests that keep tokens on their node.
//
// A guest is local if no other rank of its node has a replica of its expert. It serves the node's tokens for this
// expert, its local tokens, which would otherwise leave the node.

#include "foremoe/core/array.h"
#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

class LocalGuests {
 public:
  // With Prefer::kBalance or a single node, no tokens count as local.
  LocalGuests(const LayerProblem& problem, Prefer prefer);

  bool count() const { return tokens_.size() > 0; }

  // Local tokens that a new guest would have, over all micro-steps, in mean rank loads.
  float tokens(const ReplicaGraph& graph, int expert, int rank) const;

  // Fills each node's free slots with the experts that have the most local tokens, if these are more than `least`.
  // Slots on ranks with the lowest load at homes are filled first.
  void add(float least, ReplicaGraph& graph) const;

 private:
  const LayerProblem& problem_;
  Array<float, 2> tokens_;  // [expert][node], of the node's ranks; empty if none count
};

// For micro-step m: among guests without tokens in `assignment`, replaces those with few local tokens in m by the
// experts with the most local tokens.
void renew_local_guests(const LayerProblem& problem, int m, const Assignment& assignment, ReplicaGraph& graph);

}  // namespace foremoe::planner
