#pragma once

// Stage T as a plan needs it: the exact optimum on the replicas that are there, and among the optimal quotas some that
// keep tokens on their node.
//
// Method. The exact level comes from token assignment. Then tokens are dealt again, this time every node's to the
// replicas on the node as far as there are any and the rest to homes, and brought under that level (with Prefer::kLinks
// under the target) by the same paths; so only what balance demands leaves its node. Then single moves between replicas
// of an expert on different nodes, that lower the busiest link or, without raising it, the traffic of all links, while
// no rank exceeds the level.
//
// A guest with less than min_tokens_per_guest is taken out, the smallest first, and the rest solved again: no longer
// exact.

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

class Quotas {
 public:
  Quotas(const LayerProblem& problem, const PlannerOptions& options) : problem_(problem), options_(options) {}

  // Quotas of micro-step m on the homes and guests in `graph`. Returns the largest rank load. Guests that are taken
  // out for having too few tokens are dropped from `graph`.
  std::int64_t exact(int m, ReplicaGraph& graph, Assignment& assignment);

  // With stage T off: an equal split over the replicas that serve, the remainder to the lowest ranks. `rests[e]`
  // says that a relocated expert's home does not serve.
  std::int64_t equal(int m, const ReplicaGraph& graph, const std::vector<char>& rests, Assignment& assignment);

 private:
  bool drop_smallest_guest(ReplicaGraph& graph, const Assignment& assignment) const;
  void deal_by_node(int m, const ReplicaGraph& graph, Assignment& assignment);
  void keep_on_node(int m, std::int64_t level, const ReplicaGraph& graph, Assignment& assignment);

  const LayerProblem& problem_;
  const PlannerOptions& options_;
  AssignmentWorkspace workspace_;
  Assignment local_;
  Array<std::int64_t, 2> node_quota_;   // [expert][node], tokens
  std::vector<std::int64_t> sent_;      // [node], tokens
  std::vector<std::int64_t> received_;  // [node], tokens
};

}  // namespace foremoe::planner
