#pragma once

// Local guests, for Prefer::kLinks and kTime: guests that keep tokens on their node.
//
// A guest is local if no other rank of its node has a replica of its expert. It serves the node's tokens for this
// expert, its local tokens, which would otherwise leave the node.
//
// Copies. With kLinks they are free. With kTime, the busiest link decides how long a layer's copies take: its copies
// beyond the free ones delay the layer, whatever other links carry. Guests are therefore placed for each possible limit
// on the copies per link, and the limit with the largest worth is used: the local tokens of a mean node, less the price
// of the copies that delay the layer.

#include <functional>
#include <optional>
#include <utility>

#include "foremoe/core/array.h"
#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

class LocalGuests {
 public:
  // No tokens count as local.
  explicit LocalGuests(const LayerProblem& problem) : problem_(problem) {}
  // With Prefer::kBalance or a single node, no tokens count as local.
  LocalGuests(const LayerProblem& problem, const PlannerOptions& options);

  bool count() const { return tokens_.size() > 0; }

  // Local tokens that a new guest would have, over all micro-steps, in mean rank loads. 0 if the home of `expert` sends
  // as many copies as add() allows.
  float tokens(const ReplicaGraph& graph, int expert, int rank) const;

  // Fills free slots with the experts that have the most local tokens, if these are more than `least`. On a node, a
  // guest goes to the rank with the lowest load.
  void add(float least, ReplicaGraph& graph);

  // For micro-step m: among guests without tokens in `assignment`, replaces those with few local tokens in m by the
  // experts with the most local tokens. found: the replicas before m.
  void renew(int m, const Assignment& assignment, const ReplicaGraph& found, ReplicaGraph& graph) const;

 private:
  struct Placement {
    ReplicaGraph graph;
    float tokens = 0;  // local tokens gained, over all nodes, in mean rank loads
    int copies = 0;    // of the busiest link
  };
  using Place = std::function<Placement(int most)>;  // most: copies per link

  // Returns the most valuable placement, and the limit that it was placed with.
  std::pair<Placement, int> best(const Place& place) const;
  int copies_from(int rank, const ReplicaGraph& graph) const;

  const LayerProblem& problem_;
  std::optional<double> price_;  // of a copy, in mean rank loads; none: copies are free
  double free_copies_ = 0;       // per link
  int most_from_ = kNoLimit;     // limit of add()
  Array<float, 2> tokens_;       // [expert][node], of the node's ranks; empty if none count
};

}  // namespace foremoe::planner
