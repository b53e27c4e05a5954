// What stage T promises, against three oracles that share nothing with it: all assignments of tiny instances, all
// sets of ranks (the largest density is the optimum), and a linear program.

#include "foremoe/planner/token_assignment.h"

#include <gtest/gtest.h>

#include <ClpSimplex.hpp>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "foremoe/core/random.h"
#include "foremoe/planner/test_assignments.h"

namespace foremoe::planner {
namespace {

using Loads = std::vector<std::int64_t>;        // [expert], tokens
using Holders = std::vector<std::vector<int>>;  // [expert], ranks that hold it

struct Instance {
  ReplicaGraph graph;
  Loads load;
};

ReplicaGraph graph_of(int num_ranks, const Holders& holders) {
  ReplicaGraph graph(num_ranks, static_cast<int>(holders.size()), static_cast<int>(holders.size()));
  for (int e = 0; e < std::ssize(holders); ++e) {
    for (const int r : holders[e]) graph.put(graph.first_slot(r) + e, e);
  }
  return graph;
}

Holders holders_of(const ReplicaGraph& graph) {
  Holders holders(graph.num_experts());
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) >= 0) holders[graph.expert_in(s)].push_back(graph.rank_of(s));
  }
  return holders;
}

std::int64_t total(const Loads& load) { return std::accumulate(load.begin(), load.end(), std::int64_t{0}); }

std::int64_t ceil_mean(const Instance& i) { return (total(i.load) + i.graph.num_ranks() - 1) / i.graph.num_ranks(); }

// Tokens that a set of ranks (bits) must serve: those of experts that nobody else holds.
std::int64_t bound_to(const Instance& i, std::uint64_t ranks) {
  std::int64_t tokens = 0;
  const Holders holders = holders_of(i.graph);
  for (int e = 0; e < i.graph.num_experts(); ++e) {
    if (std::all_of(holders[e].begin(), holders[e].end(), [&](int r) { return ranks >> r & 1; })) tokens += i.load[e];
  }
  return tokens;
}

// ⌈largest density of a set of ranks⌉, over all sets.
std::int64_t densest(const Instance& i) {
  std::int64_t most = 0;
  for (std::uint64_t ranks = 1; ranks < std::uint64_t{1} << i.graph.num_ranks(); ++ranks) {
    const int size = __builtin_popcountll(ranks);
    most = std::max(most, (bound_to(i, ranks) + size - 1) / size);
  }
  return most;
}

// The least largest rank load over all ways to split all experts' tokens.
std::int64_t least_max_load(const Holders& holders, const Loads& load, Loads& rank_load, std::size_t expert = 0,
                            std::size_t holder = 0, std::int64_t left = -1) {
  if (expert == holders.size()) return *std::max_element(rank_load.begin(), rank_load.end());
  if (left < 0) left = load[expert];
  std::int64_t& of_rank = rank_load[holders[expert][holder]];
  const bool last = holder + 1 == holders[expert].size();
  std::int64_t best = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t given = last ? left : 0; given <= left; ++given) {
    of_rank += given;
    best = std::min(best, last ? least_max_load(holders, load, rank_load, expert + 1)
                               : least_max_load(holders, load, rank_load, expert, holder + 1, left - given));
    of_rank -= given;
  }
  return best;
}

// LP 1 of FineMoE: minimise t, quotas sum to the load of their expert and to at most t on their rank.
double lp_optimum(const Instance& i) {
  const int num_experts = i.graph.num_experts();
  const int num_ranks = i.graph.num_ranks();
  CoinPackedMatrix columns(true, 0, 0);
  columns.setDimensions(num_experts + num_ranks, 0);
  for (int s = 0; s < i.graph.num_slots(); ++s) {
    if (i.graph.expert_in(s) < 0) continue;
    const int rows[] = {i.graph.expert_in(s), num_experts + i.graph.rank_of(s)};
    const double ones[] = {1, 1};
    columns.appendCol(2, rows, ones);
  }
  std::vector<int> rank_rows(num_ranks);
  std::iota(rank_rows.begin(), rank_rows.end(), num_experts);
  columns.appendCol(num_ranks, rank_rows.data(), std::vector<double>(num_ranks, -1).data());
  std::vector<double> lower(i.load.begin(), i.load.end());
  std::vector<double> upper = lower;
  lower.resize(num_experts + num_ranks, -COIN_DBL_MAX);
  upper.resize(num_experts + num_ranks, 0);
  std::vector<double> cost(columns.getNumCols(), 0);
  cost.back() = 1;
  ClpSimplex lp;
  lp.setLogLevel(0);
  lp.loadProblem(columns, nullptr, nullptr, cost.data(), lower.data(), upper.data());
  lp.dual();
  EXPECT_TRUE(lp.isProvenOptimal());
  return lp.objectiveValue();
}

// Every expert's tokens on its holders, nothing else anywhere, and loads that are the sums of quotas.
void expect_complete(const Instance& i, const Assignment& a) {
  Loads served(i.graph.num_experts(), 0);
  Loads rank_load(i.graph.num_ranks(), 0);
  for (int s = 0; s < i.graph.num_slots(); ++s) {
    ASSERT_GE(a.quota[s], 0);
    if (i.graph.expert_in(s) < 0) {
      ASSERT_EQ(a.quota[s], 0);
      continue;
    }
    served[i.graph.expert_in(s)] += a.quota[s];
    rank_load[i.graph.rank_of(s)] += a.quota[s];
  }
  ASSERT_EQ(served, i.load);
  ASSERT_EQ(rank_load, a.rank_load);
}

// A load that some assignment has, and ranks that prove that none has less.
void expect_certified(const Instance& i, const Assignment& a, std::int64_t max_load,
                      const std::vector<int>& tight_set) {
  ASSERT_EQ(*std::max_element(a.rank_load.begin(), a.rank_load.end()), max_load);
  if (tight_set.empty()) {
    ASSERT_EQ(max_load, ceil_mean(i));
    return;
  }
  const std::set<int> within(tight_set.begin(), tight_set.end());
  ASSERT_EQ(within.size(), tight_set.size());
  std::int64_t tokens = 0;
  const Holders holders = holders_of(i.graph);
  for (int e = 0; e < i.graph.num_experts(); ++e) {
    if (std::all_of(holders[e].begin(), holders[e].end(), [&](int r) { return within.contains(r); })) {
      tokens += i.load[e];
    }
  }
  ASSERT_EQ((tokens + std::ssize(tight_set) - 1) / std::ssize(tight_set), max_load);
}

// Solves from the assignment given and checks all that holds for any instance.
std::int64_t solve_from(const Instance& i, Assignment& a) {
  static AssignmentWorkspace workspace;  // of many shapes in turn: what an earlier call left must not matter
  std::vector<int> tight_set{-1};
  const std::int64_t max_load = assign_tokens(i.graph, ceil_mean(i), a, workspace, &tight_set);
  expect_complete(i, a);
  expect_certified(i, a, max_load, tight_set);
  return max_load;
}

std::int64_t solve(const Instance& i) {
  Assignment a;
  water_fill(i.graph, i.load, a);
  expect_complete(i, a);
  return solve_from(i, a);
}

struct Limits {
  int ranks;
  int experts;
  std::uint64_t load;
};

// One to `ranks` ranks, mostly few holders per expert, loads from 0 to `load`, a third of them small.
Instance random_instance(Random& random, Limits most) {
  const int num_ranks = 1 + static_cast<int>(random.below(most.ranks));
  const int num_experts = 1 + static_cast<int>(random.below(most.experts));
  Holders holders(num_experts);
  Loads load(num_experts);
  for (int e = 0; e < num_experts; ++e) {
    const std::uint64_t tries = 1 + random.below(random.below(4) == 0 ? num_ranks : 2);
    std::set<int> ranks;
    for (std::uint64_t n = 0; n < tries; ++n) ranks.insert(static_cast<int>(random.below(num_ranks)));
    holders[e].assign(ranks.begin(), ranks.end());
    load[e] = static_cast<std::int64_t>(random.below(random.below(3) == 0 ? 1 + most.load / 16 : 1 + most.load));
  }
  return {graph_of(num_ranks, holders), load};
}

// All placements with at least one holder per expert and all loads up to `most`.
template <class F>
void for_all_instances(int num_ranks, int num_experts, std::int64_t most, F&& f) {
  const int placements = (1 << num_ranks) - 1;
  const auto kinds = static_cast<int>(placements * (most + 1));
  const auto count = static_cast<int>(std::lround(std::pow(kinds, num_experts)));
  for (int n = 0; n < count; ++n) {
    Holders holders(num_experts);
    Loads load(num_experts);
    int rest = n;
    for (int e = 0; e < num_experts; ++e, rest /= kinds) {
      load[e] = rest % kinds / placements;
      const int ranks = 1 + rest % kinds % placements;
      for (int r = 0; r < num_ranks; ++r) {
        if (ranks >> r & 1) holders[e].push_back(r);
      }
    }
    f(Instance{graph_of(num_ranks, holders), load});
  }
}

class EverySmallInstance : public testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(EverySmallInstance, HasTheOptimumOfBruteForce) {
  const auto [ranks, experts, most] = GetParam();
  for_all_instances(ranks, experts, most, [](const Instance& i) {
    Loads rank_load(i.graph.num_ranks(), 0);
    const std::int64_t optimum = least_max_load(holders_of(i.graph), i.load, rank_load);
    ASSERT_EQ(solve(i), optimum);
    ASSERT_EQ(densest(i), optimum);
  });
}

INSTANTIATE_TEST_SUITE_P(RanksExpertsLoad, EverySmallInstance,
                         testing::Values(std::tuple{1, 3, 3}, std::tuple{2, 2, 7}, std::tuple{2, 4, 2},
                                         std::tuple{3, 2, 5}, std::tuple{3, 3, 2}, std::tuple{4, 2, 4},
                                         std::tuple{5, 2, 2}));

TEST(AssignTokens, ReachesTheCeilingOfTheLinearProgram) {
  Random random(1);
  for (int n = 0; n < 3000; ++n) {
    const Instance i = random_instance(random, {.ranks = 12, .experts = 24, .load = 1000});
    ASSERT_EQ(solve(i), static_cast<std::int64_t>(std::ceil(lp_optimum(i) - 1e-6))) << "instance " << n;
  }
}

TEST(AssignTokens, ReachesTheCeilingOfTheLinearProgramBeyond64Ranks) {
  Random random(2);
  for (int n = 0; n < 40; ++n) {
    Instance i = random_instance(random, {.ranks = 150, .experts = 300, .load = 1000});
    ASSERT_EQ(solve(i), static_cast<std::int64_t>(std::ceil(lp_optimum(i) - 1e-6))) << "instance " << n;
  }
}

TEST(AssignTokens, IsExactForLoadsNearTwoToThe31) {
  Random random(3);
  for (int n = 0; n < 300; ++n) {
    Instance i = random_instance(random, {.ranks = 7, .experts = 12, .load = 9});
    for (std::int64_t& load : i.load) load = (std::int64_t{1} << 31) - load;
    ASSERT_EQ(solve(i), densest(i)) << "instance " << n;
  }
}

TEST(AssignTokens, StaysAtTheLowerBoundWithoutLoad) {
  Random random(4);
  for (int n = 0; n < 100; ++n) {
    Instance i = random_instance(random, {.ranks = 8, .experts = 8, .load = 0});
    ASSERT_EQ(solve(i), 0);
  }
}

TEST(AssignTokens, PermitsAnExpertWithoutLoadThatNobodyHolds) {
  EXPECT_EQ(solve({graph_of(2, {{0}, {}, {0, 1}}), {3, 0, 4}}), 4);
}

TEST(AssignTokens, ServesEverythingOnOneRank) { EXPECT_EQ(solve({graph_of(1, {{0}, {0}, {0}}), {5, 0, 7}}), 12); }

TEST(AssignTokens, SpreadsOneExpertOverMoreRanksThanExperts) {
  EXPECT_EQ(solve({graph_of(5, {{0, 1, 2, 3, 4}}), {11}}), 3);
}

// Token 0 can only leave rank 0 when every rank of the chain passes one on.
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

// Ranks 0 and 64 share a bit of the shadow; visiting one must not hide the other.
TEST(AssignTokens, TellsRanksApartThatShareAShadow) {
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

TEST(AssignTokens, NeverGetsWorseByOneMoreReplica) {
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

TEST(AssignTokens, RepeatsItselfWhateverTheWorkspaceDidBefore) {
  Random random(8);
  AssignmentWorkspace used;
  for (int n = 0; n < 200; ++n) {
    const Instance i = random_instance(random, {.ranks = 80, .experts = 80, .load = 500});
    Assignment a;
    Assignment b;
    AssignmentWorkspace fresh;
    water_fill(i.graph, i.load, a);
    water_fill(i.graph, i.load, b);
    assign_tokens(i.graph, ceil_mean(i), a, used);
    assign_tokens(i.graph, ceil_mean(i), b, fresh);
    ASSERT_EQ(a.quota, b.quota);
  }
}

// As the planner does it: a guest goes, its tokens fall back to another holder, another guest comes.
TEST(AssignTokens, FindsTheSameOptimumFromThePreviousAssignmentAsCold) {
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

TEST(Relieve, LeavesAsFewTokensAboveTheTargetAsAnyAssignment) {
  Random random(10);
  AssignmentWorkspace workspace;
  for (int n = 0; n < 500; ++n) {
    const Instance i = random_instance(random, {.ranks = 7, .experts = 14, .load = 60});
    const auto target = static_cast<std::int64_t>(random.below(2 * ceil_mean(i) + 1));
    std::int64_t least = 0;
    for (std::uint64_t ranks = 1; ranks < std::uint64_t{1} << i.graph.num_ranks(); ++ranks) {
      least = std::max(least, bound_to(i, ranks) - target * __builtin_popcountll(ranks));
    }
    Assignment a;
    serve_at_homes(i.graph, i.load, a);
    ASSERT_EQ(relieve(i.graph, target, a, workspace), least) << "instance " << n;
    expect_complete(i, a);
    std::int64_t above = 0;
    for (const std::int64_t load : a.rank_load) above += std::max<std::int64_t>(0, load - target);
    ASSERT_EQ(above, least) << "instance " << n;
  }
}

TEST(Relieve, ReportsTheSetThatNoTokenCanLeave) {
  Random random(11);
  AssignmentWorkspace workspace;
  int closed = 0;
  for (int n = 0; n < 500; ++n) {
    const Instance i = random_instance(random, {.ranks = 90, .experts = 120, .load = 60});
    Assignment a;
    water_fill(i.graph, i.load, a);
    if (relieve(i.graph, ceil_mean(i), a, workspace) == 0) continue;
    ++closed;
    const Holders holders = holders_of(i.graph);
    const std::set<int> within(workspace.closed_set().begin(), workspace.closed_set().end());
    ASSERT_EQ(std::ssize(within), std::ssize(workspace.closed_set()));
    for (int r = 0; r < i.graph.num_ranks(); ++r) {
      ASSERT_EQ(workspace.in_closed_set(r), within.contains(r));
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

TEST(Relieve, LeavesAnAssignmentWithinTheTargetAsItIs) {
  Random random(12);
  AssignmentWorkspace workspace;
  for (int n = 0; n < 100; ++n) {
    const Instance i = random_instance(random, {.ranks = 12, .experts = 24, .load = 60});
    Assignment a;
    water_fill(i.graph, i.load, a);
    const Assignment before = a;
    const std::int64_t max_load = *std::max_element(a.rank_load.begin(), a.rank_load.end());
    ASSERT_EQ(relieve(i.graph, max_load, a, workspace), 0);
    ASSERT_EQ(a.quota, before.quota);
    ASSERT_EQ(a.rank_load, before.rank_load);
  }
}

TEST(WaterFill, RaisesTheLowestHoldersToOneLevel) {
  Assignment a;
  // Rank loads 9, 2, 4, 4 at first; eight tokens for whoever is lowest.
  const Instance i{graph_of(4, {{0}, {1}, {2}, {3}, {0, 1, 2, 3}}), {9, 2, 4, 4, 8}};
  water_fill(i.graph, i.load, a);
  expect_complete(i, a);
  EXPECT_EQ(a.rank_load, (Loads{9, 6, 6, 6}));
}

TEST(WaterFill, SplitsARemainderOneTokenEach) {
  Assignment a;
  const Instance i{graph_of(4, {{0, 1, 2, 3}}), {10}};
  water_fill(i.graph, i.load, a);
  expect_complete(i, a);
  std::sort(a.rank_load.begin(), a.rank_load.end());
  EXPECT_EQ(a.rank_load, (Loads{2, 2, 3, 3}));
}

TEST(ServeAtHomes, GivesEveryTokenToTheHolderPutFirst) {
  Assignment a;
  const Instance i{graph_of(3, {{2, 0}, {1}, {0, 1, 2}}), {5, 6, 7}};
  serve_at_homes(i.graph, i.load, a);
  expect_complete(i, a);
  EXPECT_EQ(a.rank_load, (Loads{7, 6, 5}));
}

}  // namespace
}  // namespace foremoe::planner
