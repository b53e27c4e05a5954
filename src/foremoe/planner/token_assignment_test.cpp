// Tests properties of stage T on random instances, and instances solved by hand.

#include "foremoe/planner/token_assignment.h"

#include <gtest/gtest.h>

#include <set>

#include "foremoe/testing/assignment_instances.h"

namespace foremoe::planner {
namespace {

TEST(AssignTokens, StaysAtTheLowerBoundWithoutLoad) {
  Random random(4);
  for (int n = 0; n < 100; ++n) {
    Instance i = random_instance(random, {.ranks = 8, .experts = 8, .load = 0});
    ASSERT_EQ(solve(i), 0);
  }
}

TEST(AssignTokens, AcceptsAnExpertWithoutLoadAndReplicas) {
  EXPECT_EQ(solve({graph_of(2, {{0}, {}, {0, 1}}), {3, 0, 4}}), 4);
}

TEST(AssignTokens, ServesEverythingOnOneRank) { EXPECT_EQ(solve({graph_of(1, {{0}, {0}, {0}}), {5, 0, 7}}), 12); }

TEST(AssignTokens, SpreadsOneExpertOverMoreRanksThanExperts) {
  EXPECT_EQ(solve({graph_of(5, {{0, 1, 2, 3, 4}}), {11}}), 3);
}

// A token can leave rank 0 only if every rank of the chain passes a token on.
TEST(AssignTokens, MovesTokensAlongAChainOfRanks) {
  constexpr int kRanks = 40;
  Holders holders{{0}};
  for (int r = 0; r + 1 < kRanks; ++r) holders.push_back({r, r + 1});
  const Instance i{graph_of(kRanks, holders), Loads(kRanks, 1)};
  Assignment a;
  serve_at_homes(i.graph, i.load, a);
  ASSERT_EQ(a.rank_load[0], 2);
  EXPECT_EQ(solve_from(i, a), 1);
}

// Ranks 0 and 64 share a shadow bit; visiting one must not hide the other.
TEST(AssignTokens, DistinguishesRanksThatShareAShadowBit) {
  for (const Holders& holders : {Holders{{1, 0}, {1, 64}, {0}, {64}}, Holders{{1, 64}, {1, 0}, {64}, {0}}}) {
    const Instance i{graph_of(65, holders), {200, 200, 300, 0}};
    Assignment a;
    serve_at_homes(i.graph, i.load, a);
    EXPECT_EQ(solve_from(i, a), 300);
    EXPECT_EQ(i.graph.shadow(0), i.graph.shadow(1));
  }
}

TEST(AssignTokens, DoesNotDependOnTheNamesOfRanksAndExperts) {
  Random random(5);
  for (int n = 0; n < 500; ++n) {
    const Instance i = random_instance(random, {.ranks = 20, .experts = 40, .load = 500});
    const Holders holders = holders_of(i.graph);
    Holders renamed(holders.size());
    Loads load(holders.size());
    const int shift = static_cast<int>(random.below(i.graph.num_ranks()));
    const std::size_t turn = random.below(holders.size());
    for (std::size_t e = 0; e < holders.size(); ++e) {
      const std::size_t name = (2 * holders.size() - 1 - e + turn) % holders.size();
      load[name] = i.load[e];
      for (const int r : holders[e]) renamed[name].push_back((r + shift) % i.graph.num_ranks());
    }
    ASSERT_EQ(solve({graph_of(i.graph.num_ranks(), renamed), load}), solve(i)) << "instance " << n;
  }
}

TEST(AssignTokens, IsNeverWorseWithAnAdditionalReplica) {
  Random random(6);
  for (int n = 0; n < 500; ++n) {
    Instance i = random_instance(random, {.ranks = 12, .experts = 24, .load = 500});
    const std::int64_t before = solve(i);
    const int e = static_cast<int>(random.below(i.graph.num_experts()));
    const int r = static_cast<int>(random.below(i.graph.num_ranks()));
    if (i.graph.find(e, r) >= 0) continue;
    i.graph.put(i.graph.first_slot(r) + e, e);
    ASSERT_LE(solve(i), before) << "instance " << n;
  }
}

TEST(AssignTokens, ScalesWithTheLoadsUpToRounding) {
  Random random(7);
  for (int n = 0; n < 500; ++n) {
    Instance i = random_instance(random, {.ranks = 12, .experts = 24, .load = 500});
    const std::int64_t once = solve(i);
    const auto factor = 2 + static_cast<std::int64_t>(random.below(50));
    for (std::int64_t& load : i.load) load *= factor;
    const std::int64_t scaled = solve(i);
    ASSERT_LE(scaled, factor * once) << "instance " << n;
    ASSERT_GT(scaled, factor * (once - 1)) << "instance " << n;
  }
}

TEST(Relieve, ReportsAClosedSet) {
  Random random(11);
  AssignmentSearch search;
  int closed = 0;
  for (int n = 0; n < 500; ++n) {
    const Instance i = random_instance(random, {.ranks = 90, .experts = 120, .load = 60});
    Assignment a;
    water_fill(i.graph, i.load, a);
    if (search.relieve(i.graph, ceil_mean(i), a) == 0) continue;
    ++closed;
    const Holders holders = holders_of(i.graph);
    const std::set<int> within(search.closed_set().begin(), search.closed_set().end());
    ASSERT_EQ(std::ssize(within), std::ssize(search.closed_set()));
    for (int r = 0; r < i.graph.num_ranks(); ++r) {
      ASSERT_EQ(search.in_closed_set(r), within.contains(r));
      if (!within.contains(r)) {
        ASSERT_LE(a.rank_load[r], ceil_mean(i));
        continue;
      }
      ASSERT_GE(a.rank_load[r], ceil_mean(i));
      for (int s = i.graph.first_slot(r); s < i.graph.first_slot(r + 1); ++s) {
        if (a.quota[s] == 0) continue;
        for (const int holder : holders[i.graph.expert_in(s)]) ASSERT_TRUE(within.contains(holder));
      }
    }
  }
  EXPECT_GT(closed, 100);
}

}  // namespace
}  // namespace foremoe::planner
