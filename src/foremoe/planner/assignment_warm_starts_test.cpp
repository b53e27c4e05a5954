// Tests that the optimum of token assignment does not depend on its start. Starts are cold, the previous assignment
// after a change of the placement, and workspaces used for other instances.

#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/testing/assignment_instances.h"

namespace foremoe::planner {
namespace {

TEST(WaterFill, RaisesTheLowestHoldersToOneLevel) {
  Assignment a;
  // Initial rank loads 9, 2, 4, 4; eight more tokens go to the lowest ranks.
  const Instance i{graph_of(4, {{0}, {1}, {2}, {3}, {0, 1, 2, 3}}), {9, 2, 4, 4, 8}};
  water_fill(i.graph, i.load, a);
  test::expect_complete(i.graph, i.load, a);
  EXPECT_EQ(a.rank_load, (Loads{9, 6, 6, 6}));
}

TEST(WaterFill, SplitsARemainderOneTokenEach) {
  Assignment a;
  const Instance i{graph_of(4, {{0, 1, 2, 3}}), {10}};
  water_fill(i.graph, i.load, a);
  test::expect_complete(i.graph, i.load, a);
  std::sort(a.rank_load.begin(), a.rank_load.end());
  EXPECT_EQ(a.rank_load, (Loads{2, 2, 3, 3}));
}

TEST(ServeAtHomes, GivesAllTokensToTheFirstHolder) {
  Assignment a;
  const Instance i{graph_of(3, {{2, 0}, {1}, {0, 1, 2}}), {5, 6, 7}};
  serve_at_homes(i.graph, i.load, a);
  test::expect_complete(i.graph, i.load, a);
  EXPECT_EQ(a.rank_load, (Loads{7, 6, 5}));
}

// As in the planner: a guest is removed, its tokens move to another holder, and another guest is added.
TEST(AssignTokens, FindsTheSameOptimumFromWarmAndColdStarts) {
  Random random(9);
  for (int n = 0; n < 200; ++n) {
    Instance i = random_instance(random, {.ranks = 12, .experts = 24, .load = 500});
    Assignment a;
    serve_at_homes(i.graph, i.load, a);
    ASSERT_EQ(solve_from(i, a), solve(i));
    for (int change = 0; change < 20; ++change) {
      const int s = static_cast<int>(random.below(i.graph.num_slots()));
      const int r = i.graph.rank_of(s);
      if (const int e = i.graph.expert_in(s); e < 0) {
        const int arriving = s - i.graph.first_slot(r);
        i.graph.put(s, arriving);
      } else if (i.graph.num_holders(e) > 1) {
        i.graph.drop(s);
        const int back = i.graph.first_holder(e);
        a.quota[back] += a.quota[s];
        a.rank_load[i.graph.rank_of(back)] += a.quota[s];
        a.rank_load[r] -= a.quota[s];
        a.quota[s] = 0;
      }
      ASSERT_EQ(solve_from(i, a), solve(i)) << "instance " << n << ", change " << change;
    }
  }
}

TEST(AssignTokens, DoesNotDependOnEarlierUseOfTheWorkspace) {
  Random random(8);
  AssignmentSearch used;
  for (int n = 0; n < 200; ++n) {
    const Instance i = random_instance(random, {.ranks = 80, .experts = 80, .load = 500});
    Assignment a;
    Assignment b;
    AssignmentSearch fresh;
    water_fill(i.graph, i.load, a);
    water_fill(i.graph, i.load, b);
    assign_tokens(i.graph, ceil_mean(i), a, used);
    assign_tokens(i.graph, ceil_mean(i), b, fresh);
    ASSERT_EQ(a.quota, b.quota);
  }
}

TEST(Relieve, LeavesAnAssignmentWithinTheTargetUnchanged) {
  Random random(12);
  AssignmentSearch search;
  for (int n = 0; n < 100; ++n) {
    const Instance i = random_instance(random, {.ranks = 12, .experts = 24, .load = 60});
    Assignment a;
    water_fill(i.graph, i.load, a);
    const Assignment before = a;
    const std::int64_t max_load = *std::max_element(a.rank_load.begin(), a.rank_load.end());
    ASSERT_EQ(search.relieve(i.graph, max_load, a), 0);
    ASSERT_EQ(a.quota, before.quota);
    ASSERT_EQ(a.rank_load, before.rank_load);
  }
}

}  // namespace
}  // namespace foremoe::planner
