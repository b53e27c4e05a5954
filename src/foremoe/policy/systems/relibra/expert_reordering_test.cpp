// Tests ReLibra's reordering by hand and against all divisions of a few experts among two nodes.

#include "foremoe/policy/systems/relibra/expert_reordering.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "foremoe/testing/random_plans.h"

namespace foremoe::relibra {
namespace {

using testing::ElementsAre;

constexpr ReorderingOptions kFreeMoves{.move_price = 0};

// Two nodes of one rank each. Experts have 12, 2, 6 and 4 tokens.
LoadTable two_nodes() {
  LoadTable table;
  table.load = Array<Tokens, 4>({1, 1, 2, 4});
  const int tokens[2][4] = {{8, 2, 6, 0}, {4, 0, 0, 4}};
  for (int r = 0; r < 2; ++r) {
    for (int e = 0; e < 4; ++e) table.load(0, 0, r, e) = Tokens{tokens[r][e]};
  }
  return table;
}

// Node 0 has experts 0 and 1: it serves 14, receives 4 and sends 6; node 1 serves 10. Cost 14 + 6 = 20.
// With experts 0 and 2 it serves 18, receives 4 and sends 2: 18 + 4. With 2 and 1, node 1 serves 16 and receives 8.
TEST(ExpertReordering, AddsTheSlowestNodesLoadAndTheBusiestLinksTraffic) {
  const ReorderingCost cost(two_nodes(), LayerId{0}, {0, 0, 1, 1}, kFreeMoves);
  EXPECT_DOUBLE_EQ(cost.cost(), 20);
  EXPECT_DOUBLE_EQ(cost.cost_after_exchange(1, 2), 22);
  EXPECT_DOUBLE_EQ(cost.cost_after_exchange(0, 2), 24);
  EXPECT_DOUBLE_EQ(cost.cost_after_exchange(3, 1), 24);
  const ReorderingCost dear(two_nodes(), LayerId{0}, {0, 0, 1, 1}, {.communication_weight = 3, .move_price = 0});
  EXPECT_DOUBLE_EQ(dear.cost(), 14 + 3 * 6);
  EXPECT_DOUBLE_EQ(dear.cost_after_exchange(1, 2), 18 + 3 * 4);
}

TEST(ExpertReordering, SumsLoadsOverTheBatchOnRequest) {
  LoadTable load;
  load.load = Array<Tokens, 4>({2, 1, 2, 2});
  load.load(0, 0, 0, 0) = Tokens{10};  // served locally: by node 0, then by node 1
  load.load(1, 0, 1, 1) = Tokens{10};
  EXPECT_DOUBLE_EQ(ReorderingCost(load, LayerId{0}, {0, 1}, {}).cost(), 20);
  EXPECT_DOUBLE_EQ(ReorderingCost(load, LayerId{0}, {0, 1}, {.batch_totals = true}).cost(), 10);
}

TEST(ExpertReordering, UpdatesItsCostExactlyOverManyExchanges) {
  const LoadTable load =
      test::random_load({.micro_steps = 3, .layers = 1, .ranks = 6, .experts = 24, .ranks_per_node = 4}, 1);
  std::vector<int> node(24);
  for (int e = 0; e < 24; ++e) node[e] = e < 16 ? 0 : 1;  // the last node has half the ranks
  const ReorderingOptions priced{.move_price = 30};
  const auto cost_of_moves = [&](const std::vector<int>& now) {
    int moved = 0;
    for (int e = 0; e < 24; ++e) moved += now[e] != node[e] ? 1 : 0;
    return 30.0 * moved / 6;  // six ranks
  };
  ReorderingCost cost(load, LayerId{0}, node, priced);
  Random random(2);
  for (int i = 0; i < 200; ++i) {
    const auto a = static_cast<int>(random.below(24));
    const auto b = static_cast<int>(random.below(24));
    if (cost.node_of_expert()[a] == cost.node_of_expert()[b]) continue;
    const double expected = cost.cost_after_exchange(a, b);
    cost.exchange(a, b);
    EXPECT_DOUBLE_EQ(cost.cost(), expected);
    EXPECT_DOUBLE_EQ(cost.cost(), cost.cost_from_scratch());
    EXPECT_DOUBLE_EQ(cost.cost(), ReorderingCost(load, LayerId{0}, cost.node_of_expert(), {}).cost() +
                                      cost_of_moves(cost.node_of_expert()));
  }
}

std::vector<int> nodes_of(std::span<const RankId> home, const Topology& topology) {
  std::vector<int> node;
  for (const RankId r : home) node.push_back(topology.node_of(r).value);
  return node;
}

TEST(ExpertReordering, FindsTheOptimumForFewExperts) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const LoadTable load = test::random_load({.micro_steps = 2, .layers = 1, .ranks = 4, .experts = 8}, seed);
    double best = std::numeric_limits<double>::infinity();
    for (unsigned bits = 0; bits < 256; ++bits) {
      if (std::popcount(bits) != 4) continue;
      std::vector<int> node(8);
      for (int e = 0; e < 8; ++e) node[e] = static_cast<int>(bits >> e & 1U);
      best = std::min(best, ReorderingCost(load, LayerId{0}, node, {}).cost());
    }
    std::vector<RankId> home(8);
    for (int e = 0; e < 8; ++e) home[e] = RankId{e / 2};
    const ReorderingOptions hotter{.move_price = 0, .first_temperature = 0.05};
    const std::vector<RankId> reordered = reorder_experts(load, LayerId{0}, home, hotter, seed);
    EXPECT_DOUBLE_EQ(ReorderingCost(load, LayerId{0}, nodes_of(reordered, load.topology()), {}).cost(), best) << seed;
  }
}

// Node 0's ranks use only odd experts, node 1's only even ones, so no token needs to leave its node.
LoadTable odd_and_even() {
  LoadTable load;
  load.ranks_per_node = 2;
  load.load = Array<Tokens, 4>({1, 1, 4, 8});
  for (int r = 0; r < 4; ++r) {
    for (int e = 0; e < 8; ++e) load.load(0, 0, r, e) = Tokens{(r < 2) == (e % 2 == 1) ? 10 : 0};
  }
  return load;
}

TEST(ExpertReordering, MovesExpertsToTheNodeThatUsesThem) {
  const LoadTable load = odd_and_even();
  std::vector<RankId> home(8);
  for (int e = 0; e < 8; ++e) home[e] = RankId{e / 2};
  const std::vector<RankId> reordered = reorder_experts(load, LayerId{0}, home, kFreeMoves, 0);
  EXPECT_THAT(nodes_of(reordered, load.topology()), ElementsAre(1, 0, 1, 0, 1, 0, 1, 0));
  for (const int e : {1, 3, 4, 6}) EXPECT_EQ(reordered[e], home[e]);  // already on their node
  for (int r = 0; r < 4; ++r) EXPECT_EQ(std::ranges::count(reordered, RankId{r}), 2);
}

// The same loads. At first, each node sends 40 tokens, 20 per rank; after four moves, one per rank, none. Compute is
// even either way. So the moves pay below a price of 20.
TEST(ExpertReordering, MovesOnlyIfTheStepSavesMoreThanTheMovesCost) {
  const LoadTable load = odd_and_even();
  std::vector<RankId> home(8);
  for (int e = 0; e < 8; ++e) home[e] = RankId{e / 2};
  const auto moved = [&](double price) {
    const auto reordered = reorder_experts(load, LayerId{0}, home, {.move_price = price}, 0);
    int count = 0;
    for (int e = 0; e < 8; ++e) count += reordered[e] != home[e] ? 1 : 0;
    return count;
  };
  EXPECT_EQ(moved(19), 4);
  EXPECT_EQ(moved(21), 0);
}

TEST(ExpertReordering, NeverRaisesTheCostAndIsDeterministic) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const LoadTable load =
        test::random_load({.micro_steps = 3, .layers = 1, .ranks = 6, .experts = 24, .ranks_per_node = 2}, seed);
    std::vector<RankId> home(24);
    for (int e = 0; e < 24; ++e) home[e] = RankId{e % 6};
    const ReorderingOptions hot{
        .move_price = 0, .trials_per_expert = 5, .first_temperature = 10, .last_temperature = 1};
    for (const ReorderingOptions& options : {kFreeMoves, hot}) {
      const std::vector<RankId> reordered = reorder_experts(load, LayerId{0}, home, options, seed);
      EXPECT_EQ(reordered, reorder_experts(load, LayerId{0}, home, options, seed));
      const auto cost = [&](std::span<const RankId> ranks) {
        return ReorderingCost(load, LayerId{0}, nodes_of(ranks, load.topology()), {}).cost();
      };
      EXPECT_LE(cost(reordered), cost(home));
      for (int r = 0; r < 6; ++r) EXPECT_EQ(std::ranges::count(reordered, RankId{r}), 4);
    }
  }
}

}  // namespace
}  // namespace foremoe::relibra
