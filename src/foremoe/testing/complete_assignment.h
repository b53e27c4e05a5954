#pragma once

// For tests: checks the properties that every assignment must have.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::test {

// Expects that replicas serve all tokens of each expert, other slots none, and that rank loads are sums of quotas.
inline void expect_complete(const planner::ReplicaGraph& graph, std::span<const std::int64_t> expert_load,
                            const planner::Assignment& a) {
  std::vector<std::int64_t> served(expert_load.size());
  std::vector<std::int64_t> rank_load(graph.num_ranks());
  ASSERT_EQ(std::ssize(a.quota), graph.num_slots());
  for (int s = 0; s < graph.num_slots(); ++s) {
    ASSERT_GE(a.quota[s], 0);
    if (graph.expert_in(s) < 0) {
      ASSERT_EQ(a.quota[s], 0);
      continue;
    }
    served[graph.expert_in(s)] += a.quota[s];
    rank_load[graph.rank_of(s)] += a.quota[s];
  }
  ASSERT_TRUE(std::ranges::equal(served, expert_load));
  ASSERT_EQ(rank_load, a.rank_load);
}

}  // namespace foremoe::test
