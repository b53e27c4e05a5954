#include "foremoe/homes/home_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "foremoe/core/random.h"

namespace foremoe {
namespace {

struct Instance {
  int ranks = 4;
  int ranks_per_node = 2;
  int experts = 8;
  int top_k = 2;
  int tokens = 200;

  Topology topology() const { return {ranks, ranks_per_node}; }
};

std::vector<RankId> contiguous(const Instance& of) {
  std::vector<RankId> home;
  for (int e = 0; e < of.experts; ++e) home.emplace_back(e / (of.experts / of.ranks));
  return home;
}

// Experts with low ids are popular; experts e and e + experts / 2 are often chosen together.
TokenSets random_sets(const Instance& of, std::uint64_t seed) {
  Random random(seed);
  TokenSets sets{.num_experts = of.experts, .top_k = of.top_k};
  for (int t = 0; t < of.tokens; ++t) {
    std::set<int> chosen;
    while (std::ssize(chosen) < of.top_k) {
      const auto e = static_cast<int>(std::min(random.below(of.experts), random.below(of.experts)));
      chosen.insert(e);
      if (std::ssize(chosen) < of.top_k && random.below(4) > 0) chosen.insert((e + of.experts / 2) % of.experts);
    }
    for (const int e : chosen) sets.experts.emplace_back(e);
    sets.source.push_back(of.topology().node_of(RankId{static_cast<int>(random.below(of.ranks))}));
  }
  return sets;
}

// The definition of a cost, token by token.
std::int64_t cost_by_definition(const std::vector<RankId>& home, const TokenSets& sets, const Instance& of,
                                double tolerance) {
  std::int64_t pairs = 0;
  std::vector<std::int64_t> load(of.topology().num_nodes());
  for (std::size_t t = 0; t < sets.size(); ++t) {
    std::set<int> others;
    for (const ExpertId e : sets.token(t)) {
      const NodeId node = of.topology().node_of(home[e.index()]);
      ++load[node.index()];
      if (node != sets.source[t]) others.insert(node.value);
    }
    pairs += std::ssize(others);
  }
  std::int64_t cost = pairs;
  for (int n = 0; n < of.topology().num_nodes(); ++n) {
    const double share = 1.0 * of.tokens * of.top_k * of.topology().ranks_of(NodeId{n}).size() / of.ranks;
    cost += std::max<std::int64_t>(0, load[n] - static_cast<std::int64_t>((1 + tolerance) * share));
  }
  return cost;
}

TEST(HomeSearch, CostsFollowTheirDefinition) {
  for (const Instance& of : {Instance{}, Instance{.ranks = 6, .ranks_per_node = 4, .experts = 12, .top_k = 3}}) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
      const TokenSets sets = random_sets(of, seed);
      std::vector<RankId> home = contiguous(of);
      do {
        for (const double tolerance : {0.0, 0.3}) {
          ASSERT_EQ(search_cost(home, sets, of.topology(), tolerance), cost_by_definition(home, sets, of, tolerance));
        }
        std::ranges::rotate(home, home.begin() + 1);
      } while (home != contiguous(of));
      std::vector<std::int64_t> of_rank(of.ranks);
      for (const ExpertId e : sets.experts) ++of_rank[home[e.index()].index()];
      EXPECT_EQ(costs_of(home, sets, of.topology()).busiest_rank, std::ranges::max(of_rank));
    }
  }
}

TEST(HomeSearch, EndsWhereNoExchangeOfTwoExpertsReducesTheCost) {
  const Instance of{.ranks = 4, .ranks_per_node = 1, .experts = 12, .top_k = 3};
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const TokenSets sets = random_sets(of, seed);
    auto home = search_homes(contiguous(of), sets, of.topology(), {.tolerance = 0.1});
    const std::int64_t cost = cost_by_definition(home, sets, of, 0.1);
    EXPECT_LT(cost, cost_by_definition(contiguous(of), sets, of, 0.1));
    for (int a = 0; a < of.experts; ++a) {
      for (int b = 0; b < a; ++b) {
        std::swap(home[a], home[b]);
        EXPECT_GE(cost_by_definition(home, sets, of, 0.1), cost);
        std::swap(home[a], home[b]);
      }
    }
  }
}

// Tokens choose two experts with the same id modulo the number of nodes, so contiguous homes always separate them.
TEST(HomeSearch, GathersExpertsThatTokensChooseTogether) {
  const Topology topology{8, 2};
  TokenSets sets{.num_experts = 32, .top_k = 2};
  Random random(1);
  for (int t = 0; t < 4000; ++t) {
    const auto class_of = static_cast<int>(random.below(4));
    const auto a = static_cast<int>(random.below(8));
    const auto b = (a + 1 + static_cast<int>(random.below(7))) % 8;
    sets.experts.insert(sets.experts.end(), {ExpertId{4 * a + class_of}, ExpertId{4 * b + class_of}});
    sets.source.emplace_back(random.below(4));
  }
  const Instance of{.ranks = 8, .ranks_per_node = 2, .experts = 32};
  const auto home = search_homes(contiguous(of), sets, topology, {});
  for (int e = 4; e < 32; ++e) EXPECT_EQ(topology.node_of(home[e]), topology.node_of(home[e % 4]));
}

TEST(HomeSearch, NeverCostsMoreThanTheGivenHomesAndKeepsAnEqualNumberOnEachRank) {
  for (const Instance& of : {Instance{.ranks = 8, .ranks_per_node = 2, .experts = 32, .top_k = 4, .tokens = 500},
                             Instance{.ranks = 6, .ranks_per_node = 4, .experts = 24, .top_k = 3, .tokens = 500},
                             Instance{.ranks = 8, .ranks_per_node = 8, .experts = 32, .top_k = 4, .tokens = 500},
                             Instance{.ranks = 8, .ranks_per_node = 2, .experts = 8, .tokens = 0}}) {
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      for (const int sweeps : {0, 1, 20}) {
        const TokenSets sets = random_sets(of, seed);
        std::vector<RankId> given = contiguous(of);
        std::ranges::rotate(given, given.begin() + static_cast<int>(seed));
        const auto home = search_homes(given, sets, of.topology(), {.sweeps = sweeps, .seed = seed});
        EXPECT_LE(cost_by_definition(home, sets, of, 0.2), cost_by_definition(given, sets, of, 0.2));
        for (int r = 0; r < of.ranks; ++r) {
          EXPECT_EQ(std::ranges::count(home, RankId{r}), of.experts / of.ranks);
        }
        EXPECT_EQ(search_homes(given, sets, of.topology(), {.sweeps = sweeps, .seed = seed}), home);
      }
    }
  }
}

TEST(HomeSearch, SpreadsTheExpertsOfANodeOverItsRanksByLoad) {
  TokenSets sets{.num_experts = 4, .top_k = 1};
  for (int e = 0; e < 4; ++e) {
    for (int i = 0; i < 40 - 10 * e; ++i) {
      sets.experts.emplace_back(e);
      sets.source.emplace_back(0);
    }
  }
  const std::vector<RankId> given{RankId{0}, RankId{0}, RankId{1}, RankId{1}};   // loads 70 and 30
  const std::vector<RankId> spread{RankId{0}, RankId{1}, RankId{1}, RankId{0}};  // 50 and 50
  EXPECT_EQ(search_homes(given, sets, {.num_ranks = 2, .ranks_per_node = 2}, {}), spread);
}

TEST(TokenSets, CostNothingWhereATokenNeedsNoExpert) {
  TokenSets sets{.num_experts = 4, .top_k = 2};
  sets.experts = {ExpertId{3}, kUnassigned, ExpertId{0}, ExpertId{2}, kUnassigned, kUnassigned};
  sets.source = {NodeId{0}, NodeId{0}, NodeId{1}};
  const std::vector<RankId> home{RankId{0}, RankId{0}, RankId{1}, RankId{1}};
  const HomeCosts costs = costs_of(home, sets, {.num_ranks = 2, .ranks_per_node = 1});
  EXPECT_EQ(costs.assignments, 3);
  EXPECT_EQ(costs.pairs, 2);
  EXPECT_EQ(costs.busiest_rank, 2);
  EXPECT_EQ(search_homes(home, sets, {.num_ranks = 2, .ranks_per_node = 1}, {}).size(), 4U);
}

TEST(TokenSets, ThinKeepsEvenlySpacedTokens) {
  TokenSets sets{.num_experts = 16, .top_k = 2};
  for (int t = 0; t < 7; ++t) {
    sets.experts.insert(sets.experts.end(), {ExpertId{t}, ExpertId{t + 1}});
    sets.source.emplace_back(t);
  }
  thin(sets, 7);
  EXPECT_EQ(sets.size(), 7);
  thin(sets, 3);
  EXPECT_EQ(sets.source, (std::vector{NodeId{0}, NodeId{2}, NodeId{4}}));
  EXPECT_EQ(sets.token(2).front(), ExpertId{4});
  EXPECT_EQ(sets.experts.size(), 6);
}

}  // namespace
}  // namespace foremoe
