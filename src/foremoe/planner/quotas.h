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

#include "foremoe/planner/node_locality.h"

namespace foremoe::planner {

class Quotas {
 public:
  Quotas(const LayerProblem& problem, const PlannerOptions& options)
      : problem_(problem), options_(options), locality_(problem) {}

  // Quotas of micro-step m on the homes and guests in `graph`. Returns the largest rank load. Guests that are taken
  // out for having too few tokens are dropped from `graph`.
  std::int64_t exact(int m, ReplicaGraph& graph, Assignment& assignment);

  // With stage T off: an equal split over the replicas that serve, the remainder to the lowest ranks. `rests[e]`
  // says that a relocated expert's home does not serve.
  std::int64_t equal(int m, ReplicaGraph& graph, const std::vector<char>& rests, Assignment& assignment);

 private:
  bool drop_smallest_guest(ReplicaGraph& graph, const Assignment& assignment) const;

  const LayerProblem& problem_;
  const PlannerOptions& options_;
  AssignmentWorkspace workspace_;
  NodeLocality locality_;
};

}  // namespace foremoe::planner
