#pragma once

// Stage T as a plan needs it: the exact optimum on the replicas that are there, and among the optimal quotas some that
// keep tokens on their node.
//
// Method. The exact level comes from token assignment. Where there are several nodes, the tokens are then dealt again,
// every node's to its own replicas as far as there are any, brought under that level by the same paths, so that only
// what balance demands leaves its node, and improved by NodeLocality. Prefer::kLinks allows the target instead of the
// level.
//
// A guest with less than min_tokens_per_guest is taken out, the smallest first, and the rest solved again: no longer
// exact.
//
// Anchors. The tokens of an expert start in one of its slots, its anchor: at home where homes are pinned, else where
// the caller says.

#include <span>
#include <vector>

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Moves quotas so that more tokens stay on their node, at a given largest rank load.
//
// Of expert e, a node sends away what its ranks send to e beyond the quotas of e on the node, and receives the quotas
// beyond what its ranks send. A move of tokens between two replicas of e from a node that receives some to one that
// sends some away relieves both links.
//
// Method. Every such move is tried, in slot order. If the rank that it goes to is full, as much is passed on from there
// along a shortest path of moves inside a node, or of tokens that the node received anyway, to a rank with room or to
// the rank that the tokens left. A step lowers the traffic of two links and the sum of all; a path may shift traffic
// between other links, so the outcome is kept only if the busiest link is none the busier. Passes are bounded.
class NodeLocality {
 public:
  explicit NodeLocality(const LayerProblem& problem);

  // Improves the quotas of micro-step m; no rank load rises above `level` that was not.
  void improve(int m, std::int64_t level, const ReplicaGraph& graph, Assignment& assignment);

 private:
  std::int64_t busiest_link() const;
  std::size_t node_of(const ReplicaGraph& graph, int slot) const;
  // Quotas on the node beyond what its ranks send; negative: tokens that it sends away.
  std::int64_t received(int expert, std::size_t node) const;
  bool find_outlet(std::int64_t level, int from, int source, const ReplicaGraph& graph, const Assignment& a);
  bool move(std::int64_t level, int s, int t, const ReplicaGraph& graph, Assignment& a);
  void shift(int s, int t, std::int64_t tokens, const ReplicaGraph& graph, Assignment& a);

  const LayerProblem& problem_;
  int m_ = 0;
  Array<std::int64_t, 2> node_quota_;  // [expert][node], tokens
  Assignment before_;
  std::vector<int> queue_;     // [rank]
  std::vector<int> leaving_;   // [rank], slot that the path leaves to come here, −1 at its start
  std::vector<int> arriving_;  // [rank], slot by which it comes
  std::vector<char> visited_;  // [rank]
  int outlet_ = -1;            // rank at which the last path found ends
};

class Quotas {
 public:
  // `anchor` is [expert], slot.
  Quotas(const LayerProblem& problem, const PlannerOptions& options, std::vector<int> anchor)
      : problem_(problem), options_(options), anchor_(std::move(anchor)), locality_(problem) {}

  // Quotas of micro-step m on the replicas in `graph`. Returns the largest rank load. Guests that are taken out for
  // having too few tokens are dropped from `graph`.
  std::int64_t exact(int m, ReplicaGraph& graph, Assignment& assignment);

  // With stage T off: an equal split over the replicas that serve, the remainder to the lowest ranks. `rests[e]`
  // says that a relocated expert's home does not serve.
  std::int64_t equal(int m, ReplicaGraph& graph, const std::vector<char>& rests, Assignment& assignment);

 private:
  void serve_at_anchors(int m, const ReplicaGraph& graph, Assignment& assignment) const;
  // Every node's tokens to its own replicas, the least loaded rank first; what has none on its node to the anchor.
  void deal_by_node(int m, const ReplicaGraph& graph, Assignment& assignment) const;
  bool drop_smallest_guest(ReplicaGraph& graph, const Assignment& assignment) const;

  const LayerProblem& problem_;
  const PlannerOptions& options_;
  std::vector<int> anchor_;
  AssignmentSearch search_;
  NodeLocality locality_;
};

}  // namespace foremoe::planner
