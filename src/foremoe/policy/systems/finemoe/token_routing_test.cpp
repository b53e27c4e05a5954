#include "foremoe/policy/systems/finemoe/token_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/testing/random_plans.h"

namespace foremoe::finemoe {
namespace {

using testing::ElementsAre;

Shipment shipment(int expert, int source, int replica, int rows) {
  return {.expert = ExpertId{expert}, .source = RankId{source}, .replica = RankId{replica}, .rows = Tokens{rows}};
}

// One expert on ranks 0, 1 and 3 of two nodes, {0, 1} and {2, 3}. Sources have 1, 4, 3 and 2 tokens.
struct OneExpert {
  OneExpert() {
    const int tokens[] = {1, 4, 3, 2};
    for (int r = 0; r < 4; ++r) load(r, 0) = Tokens{tokens[r]};
    slot_expert(2, 0) = kNoExpert;
    slot_tokens(0, 0) = Tokens{5};
    slot_tokens(1, 0) = Tokens{1};
    slot_tokens(3, 0) = Tokens{4};
  }
  Array<Tokens, 2> load{{4, 1}};
  Array<ExpertId, 2> slot_expert{{4, 1}};
  Array<Tokens, 2> slot_tokens{{4, 1}};
  RoutingProblem problem{
      .load = load, .quotas = {slot_expert, slot_tokens}, .topology = {.num_ranks = 4, .ranks_per_node = 2}};
};

TEST(Algorithm1, FillsReplicasInOrderWithoutLocality) {
  const OneExpert one;
  EXPECT_THAT(route_by_algorithm_1(one.problem, Locality::kNone),
              ElementsAre(shipment(0, 0, 0, 1), shipment(0, 1, 0, 4), shipment(0, 2, 1, 1), shipment(0, 2, 3, 2),
                          shipment(0, 3, 3, 2)));
}

TEST(Algorithm1, RoutesLocalTokensToLocalReplicasFirst) {
  const OneExpert one;
  EXPECT_THAT(route_by_algorithm_1(one.problem, Locality::kRank),
              ElementsAre(shipment(0, 0, 0, 1), shipment(0, 1, 1, 1), shipment(0, 3, 3, 2), shipment(0, 1, 0, 3),
                          shipment(0, 2, 0, 1), shipment(0, 2, 3, 2)));
}

TEST(CommunicationVolume, CountsTheBusiestRankAndNode) {
  const OneExpert one;
  const Topology topology = one.problem.topology;
  // Without locality, rank 1 sends 4 tokens, rank 0 receives 4, and one token of rank 2 leaves its node.
  const auto none = communication_volume(route_by_algorithm_1(one.problem, Locality::kNone), topology);
  EXPECT_EQ(none.ranks, 4);
  EXPECT_EQ(none.nodes, 1);
  const auto rank = communication_volume(route_by_algorithm_1(one.problem, Locality::kRank), topology);
  EXPECT_EQ(rank.ranks, 4);  // rank 0 receives 3 and 1
  EXPECT_EQ(rank.nodes, 1);
}

// Rows that stay on their rank, and rows that stay on their node.
std::pair<std::int64_t, std::int64_t> kept(std::span<const Shipment> shipments, const Topology& topology) {
  std::int64_t on_rank = 0;
  std::int64_t on_node = 0;
  for (const Shipment& s : shipments) {
    if (s.source == s.replica) on_rank += s.rows.value;
    if (topology.node_of(s.source) == topology.node_of(s.replica)) on_node += s.rows.value;
  }
  return {on_rank, on_node};
}

TEST(Algorithm1, KeepsAsManyRowsAsRouteTokensWithNodeLocality) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const LoadTable load = foremoe::test::random_load({.ranks = 6, .experts = 12, .ranks_per_node = 4}, seed);
    const StepPlan plan = foremoe::test::random_plan(load, {.guest_slots = 2}, seed);
    for (int l = 0; l < load.num_layers(); ++l) {
      const RoutingProblem problem{.load = load.load.view()[0][l],
                                   .quotas = layer_quotas(plan, EventId{0}, LayerId{l}),
                                   .topology = load.topology()};
      const auto none = kept(route_by_algorithm_1(problem, Locality::kNone), problem.topology);
      const auto rank = kept(route_by_algorithm_1(problem, Locality::kRank), problem.topology);
      const auto node = kept(route_by_algorithm_1(problem, Locality::kNode), problem.topology);
      EXPECT_LE(none.first, rank.first);
      EXPECT_EQ(rank.first, node.first);
      EXPECT_LE(rank.second, node.second);
      EXPECT_EQ(node, kept(route_tokens(problem).shipments, problem.topology));
    }
  }
}

}  // namespace
}  // namespace foremoe::finemoe
