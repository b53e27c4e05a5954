#pragma once

// Quotas that keep tokens on their node, at a given largest rank load.
//
// Of expert e, a node sends away what its ranks send to e beyond the quotas of e on the node, and receives the quotas
// beyond what its ranks send. A move of tokens between two replicas of e from a node that receives some to one that
// sends some away relieves both links.
//
// Method. Every such move is tried, in slot order. If the rank that it goes to is full, as much is passed on from there
// along a shortest path of moves inside a node, or of tokens that the node received anyway, to a rank with room or to
// the rank that the tokens left. A step lowers the traffic of two links and the sum of all; a path may shift traffic
// between other links, so the outcome is kept only if the busiest link is none the busier. Passes are bounded.

#include <vector>

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Every node's tokens to its own replicas, the least loaded rank first; what has none on its node to the home.
void deal_by_node(const LayerProblem& problem, int m, const ReplicaGraph& graph, Assignment& assignment);

class NodeLocality {
 public:
  explicit NodeLocality(const LayerProblem& problem);

  // Improves the quotas of micro-step m; no rank load rises above `level` that was not.
  void improve(int m, std::int64_t level, const ReplicaGraph& graph, Assignment& assignment);

 private:
  std::int64_t busiest_link() const;
  std::size_t node_of(const ReplicaGraph& graph, int slot) const;
  std::int64_t received(int expert,
                        std::size_t node) const;  // quotas on the node beyond what it sends; negative: sent away
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

}  // namespace foremoe::planner
