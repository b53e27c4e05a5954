#pragma once

// Stage T in a plan: computes quotas with the exact optimal load that keep tokens on their node if possible.
//
// Method. Token assignment computes the exact level. With several nodes, it then reassigns each node's tokens of an
// expert to a replica on that node, if any. Augmenting paths lower the loads to the exact level, so that only the
// tokens needed for balance leave their node. NodeLocality improves the result. Prefer::kLinks allows loads up to the
// target instead of the level.
//
// While a guest has tokens, but fewer than min_tokens_per_guest, removes the guest with the fewest and recomputes
// quotas. The result is then no longer exact.
//
// Anchors. The tokens of an expert start in one of its slots, its anchor: its home if homes are pinned, otherwise the
// slot that the caller passes.

#include <span>
#include <vector>

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Moves quotas so that more tokens stay on their node, without exceeding a given largest rank load.
//
// For expert e, let a node's balance be e's quotas on the node minus the tokens that its ranks route to e. A node with
// a positive balance receives that many tokens; one with a negative balance sends them away. Moving quota of e from a
// receiving to a sending node relieves both links.
//
// Method. Tries every move in slot order. If the destination rank is full, it passes the same number of tokens on,
// along a shortest path to a rank with room or back to the first rank. Path edges move tokens inside a node, or tokens
// that the node received. A step lowers the traffic of two links and the total traffic. A path may shift traffic to
// other links, so the result is kept only if the busiest link has no more traffic. The number of passes is bounded.
class NodeLocality {
 public:
  explicit NodeLocality(const LayerProblem& problem);

  // Improves the quotas of micro-step m. Raises no rank load above `level`.
  void improve(int m, std::int64_t level, const ReplicaGraph& graph, Assignment& assignment);

 private:
  std::int64_t busiest_link() const;
  std::size_t node_of(const ReplicaGraph& graph, int slot) const;
  // Quotas on the node minus the tokens that its ranks send to the expert. Negative: the node sends tokens away.
  std::int64_t received(int expert, std::size_t node) const;
  bool find_outlet(std::int64_t level, int from, int source, const ReplicaGraph& graph, const Assignment& a);
  bool move(std::int64_t level, int s, int t, const ReplicaGraph& graph, Assignment& a);
  void shift(int s, int t, std::int64_t tokens, const ReplicaGraph& graph, Assignment& a);

  const LayerProblem& problem_;
  int m_ = 0;
  Array<std::int64_t, 2> node_quota_;  // [expert][node], tokens
  Assignment before_;
  std::vector<int> queue_;     // [rank]
  std::vector<int> leaving_;   // [rank], slot from which the path leaves to reach this rank, −1 at its start
  std::vector<int> arriving_;  // [rank], slot at which the path arrives
  std::vector<char> visited_;  // [rank]
  int outlet_ = -1;            // last rank of the path found last
};

class Quotas {
 public:
  // `anchor` is [expert], slot.
  Quotas(const LayerProblem& problem, const PlannerOptions& options, std::vector<int> anchor)
      : problem_(problem), options_(options), anchor_(std::move(anchor)), locality_(problem) {}

  // Computes quotas of micro-step m on the replicas in `graph`, and drops guests with too few tokens. Returns the
  // largest rank load.
  std::int64_t exact(int m, ReplicaGraph& graph, Assignment& assignment);

  // Stage T off: splits each expert's tokens equally over its serving replicas; the lowest ranks get the remainder.
  // `rests[e]` is 1 if the home of expert e does not serve, because the expert was relocated.
  std::int64_t equal(int m, ReplicaGraph& graph, const std::vector<char>& rests, Assignment& assignment);

 private:
  void serve_at_anchors(int m, const ReplicaGraph& graph, Assignment& assignment) const;
  // Assigns each node's tokens to the node's replica on its least loaded rank. Nodes without a replica use the anchor.
  void deal_by_node(int m, const ReplicaGraph& graph, Assignment& assignment) const;
  bool drop_smallest_guest(ReplicaGraph& graph, const Assignment& assignment) const;

  const LayerProblem& problem_;
  const PlannerOptions& options_;
  std::vector<int> anchor_;
  AssignmentSearch search_;
  NodeLocality locality_;
};

}  // namespace foremoe::planner
