// Tests the rows that are sent with dispatch by row and with dispatch by token.

#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "foremoe/plan/assign_rows.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/simulated_steps.h"

namespace foremoe {
namespace {

using sim_test::homes_plan;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

// Bytes of rows over all links of a kind.
Bytes row_bytes(const SimulatedPhase& phase, std::string_view link) {
  const auto of = std::ranges::find(phase.traffic, link, &LinkTraffic::link);
  return of == phase.traffic.end() ? Bytes{} : of->rows;
}

TEST(SimulatedDispatch, DispatchDeterminesTheRowsSent) {
  const test::CountedTrace recorded = test::random_trace(2, 400);
  const StepPlan plan = homes_plan(recorded.load, 0);
  const auto simulated = [&](Dispatch dispatch, bool with_tokens) {
    CostOptions options = round_options();
    options.dispatch = dispatch;
    const CostModel cost(round_cluster(), round_model(2, 8, 3), options);
    return simulate_phase(
        {.load = recorded.load, .plan = plan, .cost = cost, .tokens = with_tokens ? &recorded : nullptr}, {});
  };
  const SimulatedPhase rows = simulated(Dispatch::kRow, true);
  EXPECT_EQ(rows.seconds, simulated(Dispatch::kRow, false).seconds);
  EXPECT_FALSE(rows.dispatch_estimated);
  const SimulatedPhase counted = simulated(Dispatch::kToken, true);
  EXPECT_FALSE(counted.dispatch_estimated);
  const SimulatedPhase expected = simulated(Dispatch::kToken, false);
  EXPECT_TRUE(expected.dispatch_estimated);
  EXPECT_EQ(expected.dispatch, Dispatch::kToken);

  std::int64_t between_nodes = 0;  // one row per token served by another node
  std::int64_t busiest = 0;        // sum over dispatches; each rank sends to one other rank
  const SourceTokens tokens(recorded.trace, recorded.batching);
  for (int m = 0; m < 2; ++m) {
    for (int l = 0; l < 2; ++l) {
      const Topology topology = recorded.load.topology();
      const RoutedLayer routed = route_tokens({.load = recorded.load.load[m][l],
                                               .quotas = layer_quotas(plan, EventId{m}, LayerId{l}),
                                               .topology = topology});
      const TokenDispatch dispatch = token_dispatch(routed, {tokens, MicroStepId{m}, LayerId{l}, topology});
      std::int64_t most = 0;
      for (int s = 0; s < 4; ++s) {
        const std::int64_t sent = dispatch.to_node(s, 1 - s / 2).value;
        between_nodes += sent;
        most = std::max(most, sent);
      }
      busiest += most;
    }
  }
  EXPECT_EQ(counted.network_rows.pairs, between_nodes);
  EXPECT_DOUBLE_EQ(counted.network_rows.mean, static_cast<double>(between_nodes) / (4 * 4));
  EXPECT_DOUBLE_EQ(counted.network_rows.max, static_cast<double>(busiest) / 4);
  constexpr std::int64_t kThereAndBack = 2;
  EXPECT_EQ(row_bytes(counted, "network").value, kThereAndBack * between_nodes * 20);
  EXPECT_LT(row_bytes(counted, "network"), row_bytes(rows, "network"));
  EXPECT_NEAR(static_cast<double>(row_bytes(expected, "network").value),
              static_cast<double>(row_bytes(counted, "network").value), 0.05 * kThereAndBack * between_nodes * 20);
  EXPECT_LT(counted.parts.dispatch, rows.parts.dispatch);
  EXPECT_NEAR(expected.parts.dispatch, counted.parts.dispatch, 0.05 * counted.parts.dispatch);
}

TEST(SimulatedDispatch, ExpectedTokensChooseFromTheModelsGroups) {
  const test::CountedTrace recorded = test::random_trace(2, 400);
  const StepPlan plan = homes_plan(recorded.load, 0);
  const auto between_nodes = [&](const ExpertGroups& groups) {
    CostOptions options = round_options();
    options.dispatch = Dispatch::kToken;
    ModelShape model = round_model(2, 8, 3);
    model.groups = groups;
    const CostModel cost(round_cluster(), model, options);
    return row_bytes(simulate_phase({.load = recorded.load, .plan = plan, .cost = cost}, {}), "network");
  };
  // Each of two nodes has the experts of one group, and a token chooses from one group only.
  EXPECT_LT(between_nodes({.count = 2, .per_token = 1}), between_nodes({}));
}

}  // namespace
}  // namespace foremoe
