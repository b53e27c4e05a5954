// Compares stage T with two independent oracles: all assignments of tiny instances, and all sets of ranks (the optimum
// is the largest density). policy/clp/assignment_lp_test.cpp adds a third oracle, a linear program.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "foremoe/testing/assignment_instances.h"

namespace foremoe::planner {
namespace {

// Tokens that a set of ranks (bits) must serve: tokens of experts without replicas elsewhere.
std::int64_t bound_to(const Instance& i, std::uint64_t ranks) {
  std::int64_t tokens = 0;
  const Holders holders = holders_of(i.graph);
  for (int e = 0; e < i.graph.num_experts(); ++e) {
    if (std::all_of(holders[e].begin(), holders[e].end(), [&](int r) { return ranks >> r & 1; })) tokens += i.load[e];
  }
  return tokens;
}

// Maximum density over all sets of ranks, rounded up.
std::int64_t densest(const Instance& i) {
  std::int64_t most = 0;
  for (std::uint64_t ranks = 1; ranks < std::uint64_t{1} << i.graph.num_ranks(); ++ranks) {
    const int size = __builtin_popcountll(ranks);
    most = std::max(most, (bound_to(i, ranks) + size - 1) / size);
  }
  return most;
}

// Tokens still to assign: `left` tokens of `expert` (−1: all) to holders from `holder` on, and those of later experts.
struct Undealt {
  std::size_t expert = 0;
  std::size_t holder = 0;
  std::int64_t left = -1;
};

// Smallest possible largest rank load, over all ways to split the experts' tokens.
std::int64_t least_max_load(const Holders& holders, const Loads& load, Loads& rank_load, const Undealt& rest = {}) {
  const auto& [expert, holder, undealt] = rest;
  if (expert == holders.size()) return *std::max_element(rank_load.begin(), rank_load.end());
  const std::int64_t left = undealt < 0 ? load[expert] : undealt;
  std::int64_t& of_rank = rank_load[holders[expert][holder]];
  const bool last = holder + 1 == holders[expert].size();
  std::int64_t best = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t given = last ? left : 0; given <= left; ++given) {
    of_rank += given;
    const Undealt next =
        last ? Undealt{.expert = expert + 1} : Undealt{.expert = expert, .holder = holder + 1, .left = left - given};
    best = std::min(best, least_max_load(holders, load, rank_load, next));
    of_rank -= given;
  }
  return best;
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

TEST_P(EverySmallInstance, ReachesTheBruteForceOptimum) {
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

TEST(AssignTokens, IsExactForLoadsNearTwoToThe31) {
  Random random(3);
  for (int n = 0; n < 300; ++n) {
    Instance i = random_instance(random, {.ranks = 7, .experts = 12, .load = 9});
    for (std::int64_t& load : i.load) load = (std::int64_t{1} << 31) - load;
    ASSERT_EQ(solve(i), densest(i)) << "instance " << n;
  }
}

TEST(Relieve, LeavesAsFewTokensAboveTheTargetAsAnyAssignment) {
  Random random(10);
  AssignmentSearch search;
  for (int n = 0; n < 500; ++n) {
    const Instance i = random_instance(random, {.ranks = 7, .experts = 14, .load = 60});
    const auto target = static_cast<std::int64_t>(random.below(2 * ceil_mean(i) + 1));
    std::int64_t least = 0;
    for (std::uint64_t ranks = 1; ranks < std::uint64_t{1} << i.graph.num_ranks(); ++ranks) {
      least = std::max(least, bound_to(i, ranks) - target * __builtin_popcountll(ranks));
    }
    Assignment a;
    serve_at_homes(i.graph, i.load, a);
    ASSERT_EQ(search.relieve(i.graph, target, a), least) << "instance " << n;
    test::expect_complete(i.graph, i.load, a);
    std::int64_t above = 0;
    for (const std::int64_t load : a.rank_load) above += std::max<std::int64_t>(0, load - target);
    ASSERT_EQ(above, least) << "instance " << n;
  }
}

}  // namespace
}  // namespace foremoe::planner
