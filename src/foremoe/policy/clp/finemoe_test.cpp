// Tests FineMoE's policies: the balance reported in §7.3, and the options.

#include "foremoe/policy/systems/finemoe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/core/error.h"
#include "foremoe/testing/finemoe_instances.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::plan_of;
using test::result_of;
using testing::HasSubstr;

// Figure 8: 8 ranks, 32 experts, and a separate popularity order per layer.
LoadTable figure_8(double s, int num_orders) {
  LoadTable table{.top_k = 2, .ranks_per_node = 8};
  table.load = Array<Tokens, 4>({1, static_cast<std::size_t>(num_orders), 8, 32});
  Random random(1);
  for (int l = 0; l < num_orders; ++l) {
    const auto input = finemoe::test::spread_over_sources(finemoe::test::zipf_load(32, s, 262'144, random), 8);
    std::ranges::transform(input.flat(), table.load.view()[0][l].flat().begin(), [](auto n) { return Tokens{n}; });
  }
  return table;
}

TEST(FineMoe, BalancesLikeFigure8) {
  for (const double s : {0.0, 0.4, 0.8, 1.0, 1.4, 2.0}) {
    const LoadTable load = figure_8(s, 40);
    const Spread symmetric =
        plan_figures(plan_of(*make_finemoe_symmetric(), {.load = load, .guest_slots = 4}), load).rho;
    const Spread random = plan_figures(plan_of(*make_finemoe_random(), {.load = load, .guest_slots = 4}), load).rho;
    const Spread adaptive = plan_figures(plan_of(*make_finemoe(), {.load = load, .guest_slots = 4}), load).rho;
    if (s <= 0.8) {
      EXPECT_LE(symmetric.mean, 1.005) << s;
    }
    if (s > 1) {
      EXPECT_GT(symmetric.mean, 1.05) << s;
    }
    EXPECT_LE(symmetric.mean, random.mean + 0.001) << s;
    EXPECT_LE(adaptive.max, 1.005) << s;
  }
}

// "uniform replica counts are insufficient for severe imbalances", since only two ranks serve the most popular expert.
TEST(FineMoe, IsLimitedByTwoReplicasUnderSevereSkew) {
  const LoadTable load = figure_8(2.0, 5);
  const StepPlan plan = plan_of(*make_finemoe_symmetric(), {.load = load, .guest_slots = 4});
  for (int l = 0; l < load.num_layers(); ++l) {
    std::int64_t most_popular = 0;
    for (int e = 0; e < 32; ++e)
      most_popular = std::max(most_popular, test::expert_load(load, MicroStepId{0}, l, e).value);
    EXPECT_GE(plan.max_load(0, l).value, most_popular / 2);
  }
}

TEST(FineMoe, ReachesEquation3OfItsPlacement) {
  const LoadTable load = figure_8(1.2, 8);
  for (const auto& policy : {make_finemoe_symmetric(), make_finemoe_random(), make_finemoe()}) {
    const StepPlan plan = plan_of(*policy, {.load = load, .guest_slots = 4});
    for (int l = 0; l < load.num_layers(); ++l) {
      std::vector<std::int64_t> of_expert(32);
      load.expert_loads(MicroStepId{0}, LayerId{l}, of_expert);
      const auto holders = finemoe::test::holders_of(plan.slot_expert.view()[0][l], 32);
      EXPECT_EQ(plan.max_load(0, l).value, finemoe::test::densest_set(holders, of_expert, 8)) << plan.policy;
    }
  }
}

TEST(FineMoe, PinsHomesAndKeepsGuestsWithoutReplacement) {
  const LoadTable load = test::random_load({.micro_steps = 5, .ranks = 8, .experts = 32, .ranks_per_node = 4}, 1);
  for (const auto& policy : {make_finemoe_symmetric(), make_finemoe_random()}) {
    for (const int in_flight : {1, 3}) {
      const StepPlan plan = plan_of(*policy, {.load = load, .guest_slots = 8, .in_flight = in_flight});  // d = 3
      EXPECT_EQ(plan.residency, Residency::kResident);
      for (int t = 1; t < plan.num_events(); ++t) {
        EXPECT_TRUE(std::ranges::equal(plan.slot_expert.view()[t].flat(), plan.slot_expert.view()[0].flat()));
      }
    }
  }
  EXPECT_EQ(plan_of(*make_finemoe(), {.load = load, .guest_slots = 8}).residency, Residency::kFree);
}

TEST(FineMoe, ReportsWhyItIsSkipped) {
  const LoadTable load = test::random_load({.ranks = 4, .experts = 8}, 1);
  const auto reason = [&](const Policy& policy, const test::PolicyRun& run) {
    return std::get<Skipped>(result_of(policy, run)).reason;
  };
  EXPECT_THAT(reason(*make_finemoe_symmetric(), {.load = load, .guest_slots = 3}), HasSubstr("d ≥ 2: 2, not 3"));
  EXPECT_THAT(reason(*make_finemoe_random(), {.load = load, .guest_slots = 1}), HasSubstr("d ≥ 2: 2, not 1"));
  EXPECT_THAT(reason(*make_finemoe(), {.load = load, .guest_slots = 2, .in_flight = 2}),
              HasSubstr("one micro-step in flight"));
  ThreadPool pool(1);
  const LoadTable uneven = test::random_load({.ranks = 3, .experts = 8}, 1);
  const Array<RankId, 2> home({2, 8});
  for (const auto& policy : {make_finemoe(), make_finemoe_symmetric(), make_finemoe_random()}) {
    EXPECT_TRUE(std::holds_alternative<Skipped>(policy->plan({.load = uneven, .home = home, .options = {}}, pool)));
  }
}

TEST(FineMoe, ShufflesDeterministicallyPerSeed) {
  const LoadTable load = test::random_load({}, 1);
  const auto placed = [&](std::uint64_t seed) {
    return plan_of(*make_finemoe_random(), {.load = load, .guest_slots = 2, .seed = seed}).slot_expert;
  };
  EXPECT_EQ(placed(1), placed(1));
  EXPECT_NE(placed(1), placed(2));
}

TEST(FineMoe, IsEquallyBalancedByLinearProgramAndExactSolver) {
  const LoadTable load = test::random_load({.micro_steps = 6, .layers = 3, .ranks = 8, .experts = 32}, 2);
  for (const auto make : {make_finemoe_symmetric, make_finemoe_random, make_finemoe}) {
    EXPECT_EQ(
        plan_of(*make({}), {.load = load, .guest_slots = 4}).max_load,
        plan_of(*make({.scheduler = {.solver = finemoe::Solver::kExact}}), {.load = load, .guest_slots = 4}).max_load);
  }
}

TEST(FineMoe, SendsFewerTokensBetweenNodesIfCommunicationAware) {
  const LoadTable load = test::random_load({.micro_steps = 6, .ranks = 8, .experts = 32, .ranks_per_node = 4}, 3, 400);
  const FineMoeOptions aware{.scheduler = {.solver = finemoe::Solver::kCommunicationAware}};
  const auto link = [&](const FineMoeOptions& options) {
    return plan_figures(plan_of(*make_finemoe_symmetric(options), {.load = load, .guest_slots = 4}), load)
        .node_link_tokens.mean;
  };
  EXPECT_LT(link(aware), link({}));
}

TEST(FineMoe, BalancesBetterTheMoreTokensAreScheduled) {
  const LoadTable load = test::random_load({.micro_steps = 4, .ranks = 8, .experts = 32}, 4, 400);
  const auto rho = [&](double fraction) {
    const FineMoeOptions options{.scheduler = {.scheduled_fraction = fraction}};
    return plan_figures(plan_of(*make_finemoe_symmetric(options), {.load = load, .guest_slots = 4}), load).rho.mean;
  };
  EXPECT_LT(rho(0.5), rho(0.0));
  EXPECT_LE(rho(1.0), rho(0.5));
  const auto online = [](double fraction) {
    return make_finemoe({.scheduler = {.scheduled_fraction = fraction}})->online().planning_seconds_per_slot;
  };
  EXPECT_GT(online(0.5), 0);
  EXPECT_EQ(online(0), 0) << "nothing is scheduled";
}

TEST(FineMoe, PredictsFromThePreviousLoadAndStartsFromThePreviousPlan) {
  const LoadTable load = test::random_load({.ranks = 4, .experts = 16}, 5);
  const LoadTable former = test::random_load({.micro_steps = 2, .ranks = 4, .experts = 16}, 6);
  const auto policy = make_finemoe({.replacement = {.threshold = 1.0}});
  const StepPlan of_former = plan_of(*policy, {.load = former, .guest_slots = 1});
  const StepPlan predicted = plan_of(*policy, {.load = load, .guest_slots = 1, .previous_load = &former});
  EXPECT_TRUE(std::ranges::equal(predicted.slot_expert.view()[0].flat(), of_former.slot_expert.view()[0].flat()));

  const auto contented = make_finemoe({.replacement = {.threshold = 100}});
  const StepPlan kept = plan_of(*contented, {.load = load, .guest_slots = 1, .previous = &of_former});
  const auto holds = [](const StepPlan& plan, int r) {
    const auto row = plan.slot_expert.row(0, 0, r);
    return std::multiset<ExpertId>(row.begin(), row.end());
  };
  for (int r = 0; r < 4; ++r) EXPECT_EQ(holds(kept, r), holds(of_former, r));
}

TEST(FineMoe, ReplacesThePlacementEveryIntervalWithinAStep) {
  const LoadTable load = test::random_load({.micro_steps = 6, .layers = 1, .ranks = 4, .experts = 16}, 7);
  const StepPlan plan = plan_of(*make_finemoe({.replacement = {.threshold = 1, .interval = 2, .window = 2}}),
                                {.load = load, .guest_slots = 0});
  const auto same = [&](int a, int b) {
    return std::ranges::equal(plan.slot_expert.view()[a].flat(), plan.slot_expert.view()[b].flat());
  };
  EXPECT_TRUE(same(0, 1) && same(2, 3) && same(4, 5));
  EXPECT_FALSE(same(1, 2));
  EXPECT_FALSE(same(3, 4));
}

TEST(FineMoe, RejectsAPreviousLoadOfAnotherModel) {
  const LoadTable load = test::random_load({.layers = 2}, 1);
  LoadTable former = test::random_load({.layers = 3}, 1);
  former.name = "former";
  EXPECT_THROW(result_of(*make_finemoe(), {.load = load, .guest_slots = 2, .previous_load = &former}), InputError);
}

}  // namespace
}  // namespace foremoe
