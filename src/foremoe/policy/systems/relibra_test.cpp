// Tests ReLibra as a policy.

#include "foremoe/policy/systems/relibra.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/plan/check_plan.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

const RelibraOptions kFreeMoves{.reordering = {.move_price = 0}};  // loads of these tests are small

struct Planned {
  StepPlan plan;
  PlanFigures figures;
};

Planned planned(const LoadTable& load, const PlannerOptions& planner_options,
                const RelibraOptions& options = kFreeMoves) {
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  ThreadPool pool(1);
  const PolicyResult result =
      make_relibra(options)->plan({.load = load, .home = home, .options = planner_options}, pool);
  Planned planned{.plan = std::get<PlannedStep>(result).plan, .figures = {}};
  planned.figures = plan_figures(planned.plan, load, {.initial_home = home});
  const CheckReport report = check_plan(planned.plan, load, {.initial_home = home, .reported = &planned.figures});
  EXPECT_TRUE(report.ok()) << report.violations.front().message;
  return planned;
}

const LoadTable& two_nodes() {
  static const LoadTable load =
      test::random_load({.micro_steps = 5, .layers = 3, .ranks = 8, .experts = 32, .ranks_per_node = 4}, 1, 400);
  return load;
}

TEST(Relibra, ReplicatesWithinTheNodeAndReordersAcrossNodes) {
  const auto& [plan, figures] = planned(two_nodes(), {.guest_slots = 2});
  EXPECT_EQ(plan.residency, Residency::kShared);
  EXPECT_GT(figures.home_moves, 0);
  EXPECT_GT(figures.guests_per_layer, 0);
  const Topology topology = two_nodes().topology();
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (const ExpertId e : plan.slot_expert.row(t, l, r)) {
          if (e != kNoExpert) {
            EXPECT_TRUE(topology.same_node(plan.home(l, e), RankId{r}));
          }
        }
      }
    }
  }
}

TEST(Relibra, MovesNoHomesOnASingleNodeOrWithoutReordering) {
  LoadTable load = two_nodes();
  load.ranks_per_node = 8;
  EXPECT_EQ(planned(load, {.guest_slots = 1}).figures.home_moves, 0);
  EXPECT_EQ(planned(two_nodes(), {.guest_slots = 1}, {.reorder = false}).figures.home_moves, 0);
}

TEST(Relibra, MovesFewerHomesTheMoreAMoveCosts) {
  std::int64_t before = planned(two_nodes(), {.guest_slots = 1}).figures.home_moves;
  const std::unique_ptr<Policy> policy = make_relibra();
  std::vector<Option> options = policy->options();
  for (const char* price : {"300", "100000"}) {
    option_named(options, "move_price").set(price);
    const LoadTable& load = two_nodes();
    const StepPlan plan = test::plan_of(*policy, {.load = load});
    const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
    const std::int64_t moves = plan_figures(plan, load, {.initial_home = home}).home_moves;
    EXPECT_LT(moves, before) << price;
    before = moves;
  }
  EXPECT_EQ(before, 0);
}

TEST(Relibra, BalancesBetterWithEachOfItsMechanisms) {
  const double vanilla = planned(two_nodes(), {.guest_slots = 0}, {.reorder = false}).figures.rho.mean;
  const double replicated = planned(two_nodes(), {.guest_slots = 2}, {.reorder = false}).figures.rho.mean;
  const double both = planned(two_nodes(), {.guest_slots = 2}).figures.rho.mean;
  EXPECT_LT(replicated, vanilla);
  EXPECT_LT(both, replicated);
}

TEST(Relibra, SendsFewerTokensBetweenNodesWithALargerWeight) {
  const auto link = [](double weight) {
    return planned(two_nodes(), {.guest_slots = 1}, {.reordering = {.communication_weight = weight, .move_price = 0}})
        .figures.node_link_tokens.mean;
  };
  EXPECT_LT(link(100), link(0));
}

TEST(Relibra, ReordersDeterministicallyPerSeed) {
  const auto homes = [](std::uint64_t seed) {
    return planned(two_nodes(), {.guest_slots = 1, .seed = seed}).plan.home;
  };
  EXPECT_EQ(homes(1), homes(1));
  EXPECT_NE(homes(1), homes(2));
}

TEST(Relibra, PlansWithSeveralMicroStepsInFlight) {
  const auto& [plan, figures] = planned(two_nodes(), {.guest_slots = 1, .in_flight = 3});
  EXPECT_EQ(plan.num_events(), 10);
}

TEST(Relibra, IsBalancedOnTables) {
  for (const auto& [table, bound] : {std::pair{"q30-ep16", 1.2}, {"q30-ep64-bursty", 1.4}}) {
    const std::string path = std::string("data/load-") + table + ".safetensors";
    const LoadTable load = take_first(read_load(path), 6, 1);
    EXPECT_LT(planned(load, {.guest_slots = 2}).figures.rho.mean, bound);
  }
}

}  // namespace
}  // namespace foremoe
