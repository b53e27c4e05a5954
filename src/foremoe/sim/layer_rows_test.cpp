#include "foremoe/sim/layer_rows.h"

#include <gtest/gtest.h>

#include "foremoe/sim/test_clusters.h"

namespace foremoe {
namespace {

// Any quotas that sum to the loads, on as many replicas as fit.
StepPlan scattered(const LoadTable& load, Random& random) {
  StepPlan plan = sim_test::homes_plan(load, 2);
  const int homes = load.num_experts() / load.num_ranks();
  for (int l = 0; l < load.num_layers(); ++l) {
    for (int r = 0; r < load.num_ranks(); ++r) {
      for (int g = 0; g < 2; ++g) {
        const ExpertId e{random.below(static_cast<std::uint64_t>(load.num_experts()))};
        const int home = e.value / homes;
        if (home == r || (g == 1 && plan.slot_expert(0, l, r, homes) == e)) continue;
        Tokens& left = plan.slot_tokens(0, l, home, e.value % homes);
        const Tokens part{static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(left.value) + 1))};
        left -= part;
        plan.slot_expert(0, l, r, homes + g) = e;
        plan.slot_tokens(0, l, r, homes + g) = part;
      }
    }
  }
  return plan;
}

TEST(LayerRowsTest, AreTheSumsOfTheDispatchTable) {
  Random random(4);
  RowWorkspace workspace;
  LayerRows rows;
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks_per_node = static_cast<int>(1 + random.below(5));  // of 6: the last node may have fewer
    const LoadTable load = sim_test::random_load(
        {.micro_steps = 1, .layers = 1, .ranks = 6, .experts = 12, .ranks_per_node = ranks_per_node}, random);
    const StepPlan plan = scattered(load, random);
    const RoutingProblem problem{
        .load = load.load[0][0], .quotas = layer_quotas(plan, EventId{0}, LayerId{0}), .topology = load.topology()};
    count_rows(problem, workspace, rows);

    const Array<Tokens, 2> table = dispatch_table(route_tokens(problem));
    std::vector<RankRows> expected(6);
    Array<std::int64_t, 2> between(rows.between_nodes.shape());
    for (int s = 0; s < 6; ++s) {
      for (int d = 0; d < 6; ++d) {
        const std::int64_t count = table(s, d).value;
        if (s == d) continue;
        RankRows& from = expected[static_cast<std::size_t>(s)];
        RankRows& to = expected[static_cast<std::size_t>(d)];
        if (load.topology().same_node(RankId{s}, RankId{d})) {
          from.sent_to_peers += count;
          to.received_from_peers += count;
        } else {
          from.sent_to_nodes += count;
          to.received_from_nodes += count;
          between(load.topology().node_of(RankId{s}), load.topology().node_of(RankId{d})) += count;
        }
      }
    }
    for (std::size_t r = 0; r < 6; ++r) {
      EXPECT_EQ(rows.ranks[r].sent_to_peers, expected[r].sent_to_peers);
      EXPECT_EQ(rows.ranks[r].received_from_peers, expected[r].received_from_peers);
      EXPECT_EQ(rows.ranks[r].sent_to_nodes, expected[r].sent_to_nodes);
      EXPECT_EQ(rows.ranks[r].received_from_nodes, expected[r].received_from_nodes);
    }
    EXPECT_EQ(rows.between_nodes, between);
  }
}

}  // namespace
}  // namespace foremoe
