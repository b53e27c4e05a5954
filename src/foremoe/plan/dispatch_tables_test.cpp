#include "foremoe/plan/dispatch_tables.h"

#include <gtest/gtest.h>

#include <set>

#include "foremoe/plan/test_plans.h"
#include "foremoe/plan/test_traces.h"

namespace foremoe {
namespace {

TEST(DispatchTable, SendsWhatSourcesHoldAndReceivesWhatRanksServe) {
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
  const test::BatchedTrace batched = test::random_trace(3, 40);
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

}  // namespace
}  // namespace foremoe
