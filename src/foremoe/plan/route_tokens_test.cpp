#include "foremoe/plan/assign_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "foremoe/plan/row_choice.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

constexpr ExpertId kExpert{0};

Shipment ship(int source, int replica, int rows) { return {kExpert, RankId{source}, RankId{replica}, Tokens{rows}}; }

// One expert on four ranks in two nodes. load: rows of each source. quota: of each rank, 0 without a replica.
RoutedLayer route_one_expert(const std::vector<int>& load, const std::vector<int>& quota) {
  const std::size_t num_ranks = load.size();
  Array<Tokens, 2> rows({num_ranks, 1});
  Array<ExpertId, 2> slot_expert({num_ranks, 1}, kNoExpert);
  Array<Tokens, 2> slot_tokens({num_ranks, 1});
  for (std::size_t r = 0; r < num_ranks; ++r) {
    rows(r, 0) = Tokens{load[r]};
    slot_tokens(r, 0) = Tokens{quota[r]};
    if (quota[r] > 0) slot_expert(r, 0) = kExpert;
  }
  return route_tokens({rows, {slot_expert, slot_tokens}, {.num_ranks = int(num_ranks), .ranks_per_node = 2}});
}

TEST(RouteTokens, RowsStayOnTheirRankUpToItsQuota) {
  const RoutedLayer routed = route_one_expert({3, 5, 0, 2}, {3, 4, 1, 2});
  EXPECT_THAT(routed.shipments, ElementsAre(ship(0, 0, 3), ship(1, 1, 4), ship(1, 2, 1), ship(3, 3, 2)));
}

TEST(RouteTokens, RowsLeaveTheirNodeOnlyWhenItsQuotasAreExhausted) {
  // Rank 0's rows fill rank 1 first. The quota of rank 3, on the other node, goes to its neighbour rank 2 first.
  const RoutedLayer routed = route_one_expert({6, 0, 4, 0}, {0, 5, 0, 5});
  EXPECT_THAT(routed.shipments, ElementsAre(ship(0, 1, 5), ship(0, 3, 1), ship(2, 3, 4)));
}

TEST(RouteTokens, ExhaustsSourcesAndReplicasInAscendingOrder) {
  const RoutedLayer routed = route_one_expert({4, 4, 0, 0}, {0, 0, 3, 5});
  EXPECT_THAT(routed.shipments, ElementsAre(ship(0, 2, 3), ship(0, 3, 1), ship(1, 3, 4)));
}

TEST(RouteTokens, ListsAnExpertsShipmentsInTheOrderOfTheSweeps) {
  // Rows go to the own rank 1, then its neighbour 0, then rank 2, not in the order of ranks.
  const RoutedLayer routed = route_one_expert({0, 9, 0, 0}, {2, 3, 4, 0});
  EXPECT_THAT(routed.of_source(RankId{1}), ElementsAre(ship(1, 1, 3), ship(1, 0, 2), ship(1, 2, 4)));
  EXPECT_TRUE(routed.of_source(RankId{0}).empty());
}

TEST(RouteTokens, AnExpertWithoutLoadShipsNothing) { EXPECT_TRUE(route_one_expert({0, 0}, {0, 0}).shipments.empty()); }

TEST(RouteTokens, SupportsALastNodeWithFewerRanks) {
  const RoutedLayer routed = route_one_expert({0, 0, 4}, {2, 2, 0});
  EXPECT_THAT(routed.shipments, ElementsAre(ship(2, 0, 2), ship(2, 1, 2)));
}

class RouteTokensOfRandomPlans : public testing::TestWithParam<int> {};

TEST_P(RouteTokensOfRandomPlans, DeliverAllRowsAndMeetAllQuotas) {
  const LoadTable load = test::random_load({.ranks = 8, .experts = 16, .ranks_per_node = 3}, 1);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 3, .in_flight = GetParam()}, 2);
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      const auto rows = load.load[plan.event_micro_step[t]][l];
      const LayerQuotas quotas = layer_quotas(plan, EventId{t}, LayerId{l});
      Array<Tokens, 2> sent({8, 16});
      Array<Tokens, 2> received({8, 16});
      for (const Shipment& s : route_tokens({rows, quotas, load.topology()}).shipments) {
        EXPECT_GT(s.rows, Tokens{0});
        sent(s.source, s.expert) += s.rows;
        received(s.replica, s.expert) += s.rows;
      }
      EXPECT_TRUE(std::ranges::equal(sent.flat(), rows.flat()));
      for (int r = 0; r < 8; ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = quotas.slot_expert(r, s);
          if (e == kNoExpert) continue;
          EXPECT_EQ(received(r, e), quotas.slot_tokens(r, s));
          received(r, e) = Tokens{0};
        }
      }
      EXPECT_THAT(received.flat(), testing::Each(Tokens{0}));
    }
  }
}

TEST_P(RouteTokensOfRandomPlans, FormFewPairsPerSweepAndCrossNodesOnlyForMissingQuota) {
  const LoadTable load = test::random_load({.ranks = 8, .experts = 16, .ranks_per_node = 3}, 3);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 3, .in_flight = GetParam()}, 4);
  const Topology topology = load.topology();
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      const auto rows = load.load[plan.event_micro_step[t]][l];
      const LayerQuotas quotas = layer_quotas(plan, EventId{t}, LayerId{l});
      const RoutedLayer routed = route_tokens({rows, quotas, topology});
      for (int e = 0; e < 16; ++e) {
        int sources = 0;
        int replicas = 0;
        std::vector<std::int64_t> surplus(topology.num_nodes());
        for (int r = 0; r < 8; ++r) {
          sources += rows(r, e) > Tokens{0};
          surplus[topology.node_of(RankId{r}).index()] += rows(r, e).value;
          for (int s = 0; s < plan.num_slots(); ++s) {
            if (quotas.slot_expert(r, s) != ExpertId{e} || quotas.slot_tokens(r, s) == Tokens{0}) continue;
            ++replicas;
            surplus[topology.node_of(RankId{r}).index()] -= quotas.slot_tokens(r, s).value;
          }
        }
        std::int64_t must_cross = 0;
        for (const std::int64_t x : surplus) must_cross += std::max<std::int64_t>(x, 0);
        std::int64_t crosses = 0;
        std::array<int, 3> pairs{};  // per sweep
        for (const Shipment& s : routed.shipments) {
          if (s.expert != ExpertId{e}) continue;
          ++pairs[s.source == s.replica ? 0 : topology.same_node(s.source, s.replica) ? 1 : 2];
          if (!topology.same_node(s.source, s.replica)) crosses += s.rows.value;
        }
        EXPECT_EQ(crosses, must_cross);
        for (const int n : pairs) EXPECT_LE(n, std::max(0, sources + replicas - 1));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InFlight, RouteTokensOfRandomPlans, testing::Values(1, 2, 4));

TEST(AssignRows, FillsAnExpertsShipmentsInRowOrder) {
  const RoutedLayer routed = route_one_expert({0, 4, 0, 0}, {1, 1, 2, 0});
  const std::vector<ExpertId> routes{kExpert, kNoExpert, kExpert, kExpert, kNoExpert, kExpert};
  std::vector<RankId> replica(routes.size());
  RouteWorkspace workspace;
  assign_rows(routed, {RankId{1}, routes}, workspace, replica);
  EXPECT_THAT(replica, ElementsAre(RankId{1}, kNoReplica, RankId{0}, RankId{2}, kNoReplica, RankId{2}));
}

TEST(AssignRows, AssignsEveryRowOfATraceAndMeetsEveryQuota) {
  const test::CountedTrace batched = test::random_trace(5);
  const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 2}, 6);
  const SourceTokens tokens(batched.trace, batched.batching);
  RouteWorkspace workspace;
  RoutedLayer routed;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      const LayerQuotas quotas = layer_quotas(plan, EventId{t}, LayerId{l});
      route_tokens({batched.load.load[t][l], quotas, batched.load.topology()}, workspace, routed);
      std::map<std::pair<RankId, ExpertId>, std::int64_t> received;
      for (int s = 0; s < plan.num_ranks(); ++s) {
        std::vector<ExpertId> routes;
        tokens.gather(plan.event_micro_step[t], RankId{s}, LayerId{l}, routes);
        std::vector<RankId> replica(routes.size());
        assign_rows(routed, {RankId{s}, routes}, workspace, replica);
        for (std::size_t row = 0; row < routes.size(); ++row) {
          ASSERT_EQ(routes[row] == kNoExpert, replica[row] == kNoReplica);
          if (routes[row] != kNoExpert) ++received[{replica[row], routes[row]}];
        }
      }
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = quotas.slot_expert(r, s);
          if (e == kNoExpert) continue;
          EXPECT_EQ((received[{RankId{r}, e}]), quotas.slot_tokens(r, s).value);
        }
      }
    }
  }
}

TEST(SourceTokens, ListTokensInAscendingOrderOfSequences) {
  RoutingTrace shape{.num_layers = 1, .top_k = 1, .num_experts = 8, .cu_seqlens = {0, 2, 3, 5}};
  const RoutingTrace trace = test::trace_of({0, 1, 2, 3, 255}, shape);
  const Batching batching{.num_micro_steps = 2,
                          .num_ranks = 2,
                          .ranks_per_node = 2,
                          .micro_step = {MicroStepId{1}, MicroStepId{0}, MicroStepId{1}},
                          .rank = {RankId{1}, RankId{1}, RankId{1}}};
  const SourceTokens tokens(trace, batching);
  std::vector<ExpertId> routes;
  tokens.gather(MicroStepId{1}, RankId{1}, LayerId{0}, routes);
  EXPECT_THAT(routes, ElementsAre(ExpertId{0}, ExpertId{1}, ExpertId{3}, kNoExpert));
  tokens.gather(MicroStepId{0}, RankId{1}, LayerId{0}, routes);
  EXPECT_THAT(routes, ElementsAre(ExpertId{2}));
  tokens.gather(MicroStepId{0}, RankId{0}, LayerId{0}, routes);
  EXPECT_TRUE(routes.empty());
}

TEST(DispatchTable, SendsSourceRowsAndReceivesServedRows) {
  const LoadTable load = test::random_load({.ranks = 4, .experts = 8}, 1);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 2}, 2);
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      const auto table =
          dispatch_table(route_tokens({load.load[t][l], layer_quotas(plan, EventId{t}, LayerId{l}), load.topology()}));
      for (int r = 0; r < 4; ++r) {
        Tokens sent, received, held, served;
        for (int q = 0; q < 4; ++q) {
          sent += table(r, q);
          received += table(q, r);
        }
        for (const Tokens x : load.load.row(t, l, r)) held += x;
        for (const Tokens x : plan.slot_tokens.row(t, l, r)) served += x;
        EXPECT_EQ(sent, held);
        EXPECT_EQ(received, served);
      }
    }
  }
}

// Two nodes of two ranks, four experts, expert e at home on rank e, one sequence of three tokens on rank 0.
TEST(TokenDispatch, SendsATokenOnceToEachRankAndOnceToEachNode) {
  const std::vector<std::uint8_t> routes{0,   1,     // stays on node 0: ranks 0 and 1
                                         2,   3,     // both experts on node 1: two ranks, one node
                                         255, 255};  // no route
  RoutingTrace shape{.num_layers = 1, .top_k = 2, .num_experts = 4, .cu_seqlens = {0, 3}};
  const RoutingTrace trace = test::trace_of(routes, shape);
  const Batching batching{
      .num_micro_steps = 1, .num_ranks = 4, .ranks_per_node = 2, .micro_step = {MicroStepId{0}}, .rank = {RankId{0}}};
  const LoadTable load = test::load_of(trace, batching);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 0}, 1);

  const RoutedLayer routed =
      route_tokens({load.load[0][0], layer_quotas(plan, EventId{0}, LayerId{0}), load.topology()});
  const SourceTokens tokens(trace, batching);
  const TokenDispatch dispatch = token_dispatch(routed, {tokens, MicroStepId{0}, LayerId{0}, load.topology()});
  for (int r = 0; r < 4; ++r) EXPECT_EQ(dispatch.to_rank(0, r), Tokens{1}) << r;
  EXPECT_EQ(dispatch.to_node(0, 0), Tokens{1});
  EXPECT_EQ(dispatch.to_node(0, 1), Tokens{1});
  for (int source = 1; source < 4; ++source) {
    for (int r = 0; r < 4; ++r) EXPECT_EQ(dispatch.to_rank(source, r), Tokens{0});
  }
}

TEST(TokenDispatch, SavesRowsButReachesEveryRankAndNodeThatServesTheToken) {
  const test::CountedTrace batched = test::random_trace(3, 40);
  const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 2}, 4);
  const SourceTokens tokens(batched.trace, batched.batching);
  const Topology topology = batched.load.topology();
  bool some_row_saved = false;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      const RoutedLayer routed =
          route_tokens({batched.load.load[t][l], layer_quotas(plan, EventId{t}, LayerId{l}), topology});
      const Array<Tokens, 2> rows = dispatch_table(routed);
      const TokenDispatch dispatch = token_dispatch(routed, {tokens, plan.event_micro_step[t], LayerId{l}, topology});
      for (int s = 0; s < 4; ++s) {
        for (int n = 0; n < 2; ++n) {
          const Tokens first = dispatch.to_rank(s, 2 * n);
          const Tokens second = dispatch.to_rank(s, 2 * n + 1);
          EXPECT_LE(first, rows(s, 2 * n));
          EXPECT_LE(second, rows(s, 2 * n + 1));
          EXPECT_LE(dispatch.to_node(s, n), first + second);
          EXPECT_GE(dispatch.to_node(s, n), std::max(first, second));
          some_row_saved |= dispatch.to_node(s, n) < rows(s, 2 * n) + rows(s, 2 * n + 1);
        }
      }
    }
  }
  EXPECT_TRUE(some_row_saved);
}

// Counts the places of each token as a set. 65 and more ranks or nodes are counted in another way than few.
class TokenDispatchTest : public testing::TestWithParam<std::tuple<int, Rows>> {};

TEST_P(TokenDispatchTest, CountsEachPlaceOfATokenOnce) {
  const auto [num_ranks, rows] = GetParam();
  const test::CountedTrace batched = test::random_trace(5, 60, num_ranks, std::max(8, num_ranks));
  const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 2}, 6);
  const SourceTokens tokens(batched.trace, batched.batching);
  const Topology topology = batched.load.topology();
  const LayerQuotas quotas = layer_quotas(plan, EventId{1}, LayerId{1});
  const MicroStepId m = plan.event_micro_step[1];
  const RoutedLayer routed = route_tokens({batched.load.load[m][1], quotas, topology, rows});
  Array<Tokens, 2> to_rank({std::size_t(num_ranks), std::size_t(num_ranks)});
  Array<Tokens, 2> to_node({std::size_t(num_ranks), std::size_t(topology.num_nodes())});
  RowChoiceWorkspace workspace;
  for (int s = 0; s < num_ranks; ++s) {
    std::vector<ExpertId> routes;
    tokens.gather(m, RankId{s}, LayerId{1}, routes);
    std::vector<std::int32_t> shipment(routes.size());
    const auto sent = routed.of_source(RankId{s});
    ASSERT_TRUE(rows == Rows::kToken ? choose_rows({sent, routes, 3, RankId{s}, topology}, workspace, shipment)
                                     : assign_shipments(sent, routes, workspace.route, shipment));
    for (std::size_t token = 0; token < shipment.size(); token += 3) {
      std::set<RankId> ranks;
      std::set<NodeId> nodes;
      for (std::size_t row = token; row < token + 3; ++row) {
        if (shipment[row] < 0) continue;
        const RankId replica = sent[static_cast<std::size_t>(shipment[row])].replica;
        ranks.insert(replica);
        nodes.insert(topology.node_of(replica));
      }
      for (const RankId r : ranks) to_rank(s, r) += Tokens{1};
      for (const NodeId n : nodes) to_node(s, n) += Tokens{1};
    }
  }
  const TokenDispatch dispatch = token_dispatch(routed, {tokens, m, LayerId{1}, topology, rows});
  EXPECT_EQ(dispatch.to_rank, to_rank);
  EXPECT_EQ(dispatch.to_node, to_node);
}

INSTANTIATE_TEST_SUITE_P(Ranks, TokenDispatchTest,
                         testing::Combine(testing::Values(4, 64, 66, 132),
                                          testing::Values(Rows::kOrder, Rows::kToken)));

}  // namespace
}  // namespace foremoe
