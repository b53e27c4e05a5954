// Compares the excess with brute force on small instances, and with AssignmentSearch on large ones.

#include "foremoe/planner/excess_flow.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/testing/assignment_instances.h"

namespace foremoe::planner {
namespace {

// For a set of ranks, the tokens that no other rank can serve, minus target × ranks; the maximum over all sets.
std::int64_t least_excess(const Instance& i, std::int64_t target) {
  std::int64_t most = 0;
  const Holders holders = holders_of(i.graph);
  for (std::uint64_t ranks = 1; ranks < std::uint64_t{1} << i.graph.num_ranks(); ++ranks) {
    std::int64_t excess = -target * __builtin_popcountll(ranks);
    for (int e = 0; e < i.graph.num_experts(); ++e) {
      if (std::ranges::all_of(holders[e], [&](int r) { return ranks >> r & 1; })) excess += i.load[e];
    }
    most = std::max(most, excess);
  }
  return most;
}

std::int64_t above(const Assignment& a, std::int64_t target) {
  std::int64_t tokens = 0;
  for (const std::int64_t load : a.rank_load) tokens += std::max<std::int64_t>(0, load - target);
  return tokens;
}

TEST(ExcessFlow, MovesTokensThroughFullRanks) {
  const Instance i{graph_of(3, {{0, 1}, {1, 2}}), {8, 6}};
  Assignment a;
  serve_at_homes(i.graph, i.load, a);
  EXPECT_EQ(ExcessFlow().relieve(i.graph, 5, a), 0);
  test::expect_complete(i.graph, i.load, a);
  EXPECT_LE(*std::ranges::max_element(a.rank_load), 5);
}

TEST(ExcessFlow, LeavesTokensThatNoOtherRankCanServe) {
  const Instance i{graph_of(3, {{0}, {0, 1}, {2}}), {9, 5, 0}};
  Assignment a;
  serve_at_homes(i.graph, i.load, a);
  EXPECT_EQ(ExcessFlow().relieve(i.graph, 6, a), 3);  // rank 2 has room, but no replica of the experts in excess
}

TEST(ExcessFlow, LeavesTheLargestExcessOverAllSetsOfRanks) {
  Random random(3);
  ExcessFlow flow;
  for (int n = 0; n < 4000; ++n) {
    const Instance i = random_instance(random, {.ranks = 8, .experts = 12, .load = 40});
    const auto target = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(2 * ceil_mean(i) + 2)));
    Assignment a;
    serve_at_homes(i.graph, i.load, a);
    ASSERT_EQ(flow.relieve(i.graph, target, a), least_excess(i, target)) << "instance " << n;
    test::expect_complete(i.graph, i.load, a);
    ASSERT_EQ(above(a, target), least_excess(i, target));
  }
}

TEST(ExcessFlow, AgreesWithAssignmentSearchFromAnyStart) {
  Random random(4);
  ExcessFlow flow;
  AssignmentSearch search;
  for (int n = 0; n < 500; ++n) {
    const Instance i = random_instance(random, {.ranks = 130, .experts = 300, .load = 4000});
    Assignment a;
    serve_at_homes(i.graph, i.load, a);
    for (const double share : {1.3, 1.1, 1.0, 1.02, 1.2}) {  // each call continues from the previous result
      const auto target = static_cast<std::int64_t>(share * static_cast<double>(ceil_mean(i)));
      Assignment other = a;
      ASSERT_EQ(flow.relieve(i.graph, target, a), search.relieve(i.graph, target, other)) << "instance " << n;
      test::expect_complete(i.graph, i.load, a);
    }
  }
}

}  // namespace
}  // namespace foremoe::planner
