#include "foremoe/plan/step_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

std::string spell(const ExecutionOrder& order) {
  std::string text;
  for (int t = 0; t < order.num_events(); ++t) {
    text += (order.pass[t] == Pass::kForward ? " F" : " B") + std::to_string(order.micro_step[t].value);
  }
  return text;
}

TEST(ExecutionOrder, BothPassesShareAnEventWithOneInFlight) {
  const ExecutionOrder order = make_execution_order(3, 1);
  EXPECT_EQ(spell(order), " F0 F1 F2");
  EXPECT_EQ(order.forward, order.backward);
}

TEST(ExecutionOrder, ForwardsLeadBackwardsByTheNumberInFlight) {
  EXPECT_EQ(spell(make_execution_order(4, 2)), " F0 F1 B0 F2 B1 F3 B2 B3");
  EXPECT_EQ(spell(make_execution_order(5, 4)), " F0 F1 F2 F3 B0 F4 B1 B2 B3 B4");
}

TEST(ExecutionOrder, MoreInFlightThanMicroStepsRunsAllForwardsFirst) {
  EXPECT_EQ(spell(make_execution_order(2, 8)), " F0 F1 B0 B1");
  EXPECT_EQ(spell(make_execution_order(1, 2)), " F0 B0");
  EXPECT_EQ(make_execution_order(0, 2).num_events(), 0);
}

TEST(ExecutionOrder, NeverExceedsTheRequestedNumberInFlight) {
  for (const int in_flight : {2, 3, 4, 7}) {
    const ExecutionOrder order = make_execution_order(9, in_flight);
    int between_passes = 0;
    for (const Pass pass : order.pass) {
      between_passes += pass == Pass::kForward ? 1 : -1;
      EXPECT_LE(between_passes, in_flight);
      EXPECT_GE(between_passes, 0);
    }
    for (int m = 0; m < 9; ++m) {
      EXPECT_LT(order.forward[m], order.backward[m]);
      EXPECT_EQ(order.micro_step[order.forward[m].index()], MicroStepId{m});
      EXPECT_EQ(order.micro_step[order.backward[m].index()], MicroStepId{m});
    }
  }
}

// 3 micro-steps with two in flight give 6 events. 8 experts on 4 ranks and one guest slot give 3 slots.
TEST(EmptyPlan, HasTheShapeOfTheLoadAndEmptySlots) {
  const LoadTable load = test::random_load({.micro_steps = 3, .layers = 2, .ranks = 4, .experts = 8}, 1);
  const StepPlan plan = empty_plan(
      {.policy = "x", .residency = Residency::kShared, .guest_slots = 1, .in_flight = 2, .options = "{\"a\":1}"}, load);
  EXPECT_EQ(plan.policy, "x");
  EXPECT_EQ(plan.residency, Residency::kShared);
  EXPECT_EQ(plan.in_flight, 2);
  EXPECT_EQ(plan.options, "{\"a\":1}");
  EXPECT_EQ(plan.ranks_per_node, load.ranks_per_node);
  EXPECT_EQ(plan.load_digest, load_digest(load));
  EXPECT_EQ(plan.slot_expert.shape(), (std::array<std::size_t, 4>{6, 2, 4, 3}));
  EXPECT_THAT(plan.slot_expert.flat(), testing::Each(kNoExpert));
  EXPECT_EQ(plan.slot_tokens.shape(), plan.slot_expert.shape());
  EXPECT_THAT(plan.slot_tokens.flat(), testing::Each(Tokens{0}));
  EXPECT_EQ(plan.event_micro_step.size(), 6U);
  EXPECT_EQ(plan.event_pass.size(), 6U);
  EXPECT_EQ(plan.home.shape(), (std::array<std::size_t, 2>{2, 8}));
  EXPECT_EQ(plan.max_load.shape(), (std::array<std::size_t, 2>{3, 2}));
  EXPECT_EQ(plan.lower_bound.shape(), plan.max_load.shape());
}

// Two in flight run F0 F1 B0 F2 B1 B2. Without micro-step 2 this is F0 F1 B0 B1, events 0, 1, 2 and 4.
TEST(PlanPart, KeepsTheEventsOfTheFirstMicroStepsInTheirOrder) {
  const LoadTable load = test::random_load({.micro_steps = 3, .layers = 2}, 1);
  const StepPlan whole = test::random_plan(load, {.in_flight = 2}, 1);
  const LoadTable part = take_first(load, 2, 1);
  const StepPlan first = take_first(whole, part);
  EXPECT_THAT(first.event_micro_step, ElementsAre(MicroStepId{0}, MicroStepId{1}, MicroStepId{0}, MicroStepId{1}));
  EXPECT_THAT(first.event_pass, ElementsAre(Pass::kForward, Pass::kForward, Pass::kBackward, Pass::kBackward));
  EXPECT_EQ(first.num_layers(), 1);
  EXPECT_THAT(first.slot_expert.row(3, 0, 2), testing::ElementsAreArray(whole.slot_expert.row(4, 0, 2)));
  EXPECT_THAT(first.slot_tokens.row(3, 0, 2), testing::ElementsAreArray(whole.slot_tokens.row(4, 0, 2)));
  EXPECT_THAT(first.home.row(0), testing::ElementsAreArray(whole.home.row(0)));
  EXPECT_EQ(first.max_load(1, 0), whole.max_load(1, 0));
  EXPECT_EQ(first.load_digest, load_digest(part));
}

TEST(PlanPart, IsAValidPlanForThePartOfTheLoad) {
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}) {
    for (const int in_flight : {1, 2, 3}) {
      if (residency == Residency::kFree && in_flight > 1) continue;  // forward-only
      const LoadTable load = test::random_load({.micro_steps = 5, .layers = 3}, 7);
      const StepPlan whole = test::random_plan(load, {.residency = residency, .in_flight = in_flight}, 7);
      ASSERT_TRUE(check_plan(whole, load).ok());
      for (const int micro_steps : {1, 2, 5}) {
        for (const int layers : {1, 3}) {
          const LoadTable part = take_first(load, micro_steps, layers);
          const CheckReport report = check_plan(take_first(whole, part), part);
          EXPECT_TRUE(report.ok()) << report.violations.front().message;
        }
      }
    }
  }
}

TEST(PlanPart, IsRefusedForALoadOfOtherRanksOrExperts) {
  const StepPlan whole = test::random_plan(test::random_load({}, 1), {}, 1);
  const test::Shape of = {};
  for (const test::Shape& other : {test::Shape{.ranks = of.ranks / 2}, {.experts = 2 * of.experts}}) {
    EXPECT_THROW(take_first(whole, test::random_load(other, 1)), InputError);
  }
}

TEST(PlanPart, HasNoBoundsIfThePlanRecordsNone) {
  const LoadTable load = test::random_load({}, 1);
  StepPlan whole = test::random_plan(load, {}, 1);
  whole.max_load = whole.lower_bound = {};
  const StepPlan first = take_first(whole, take_first(load, 1, 1));
  EXPECT_TRUE(first.max_load.empty());
  EXPECT_TRUE(first.lower_bound.empty());
}

// Two ranks with one expert and one guest each. Two micro-steps are in flight, so each micro-step has two events: F0 F1
// B0 B1.
TEST(PlannedLoads, AreSumsOfARanksQuotasCountedOnceForBothPasses) {
  const LoadTable load{.load = Array<Tokens, 4>({2, 1, 2, 2}), .ranks_per_node = 2};
  StepPlan plan = test::random_plan(load, {.in_flight = 2}, 1);
  for (const int event : {0, 2}) {
    plan.slot_tokens(event, 0, 0, 0) = Tokens{3};
    plan.slot_tokens(event, 0, 0, 1) = Tokens{4};
    plan.slot_tokens(event, 0, 1, 0) = Tokens{5};
  }
  for (const int event : {1, 3}) plan.slot_tokens(event, 0, 1, 1) = Tokens{6};
  const Array<Tokens, 3> loads = planned_loads(plan);
  EXPECT_THAT(loads.row(0, 0), ElementsAre(Tokens{7}, Tokens{5}));
  EXPECT_THAT(loads.row(1, 0), ElementsAre(Tokens{0}, Tokens{6}));
}

// random_plans.h computes the plan's recorded largest loads independently.
TEST(PlannedLoads, MatchTheLargestLoadsOfThePlan) {
  for (const int in_flight : {1, 2}) {
    const LoadTable load = test::random_load({.micro_steps = 4, .layers = 3}, 5);
    const StepPlan plan = test::random_plan(load, {.in_flight = in_flight}, 5);
    const Array<Tokens, 3> loads = planned_loads(plan);
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      for (int l = 0; l < load.num_layers(); ++l) {
        EXPECT_EQ(std::ranges::max(loads.row(m, l)), plan.max_load(m, l));
      }
    }
  }
}

TEST(HomeSlots, AreFilledByEachRanksExpertsInAscendingOrder) {
  const std::vector<RankId> home{RankId{2}, RankId{0}, RankId{2}, RankId{0}, RankId{2}};
  EXPECT_THAT(home_slots(home), ElementsAre(SlotId{0}, SlotId{0}, SlotId{1}, SlotId{1}, SlotId{2}));
}

TEST(Imbalance, IsTheLargestLoadOverTheMean) {
  const std::vector<Tokens> loads{Tokens{7}, Tokens{5}, Tokens{0}};
  EXPECT_EQ(imbalance(loads), 7.0 / 4);
  EXPECT_EQ(imbalance(std::vector<Tokens>(3, Tokens{6})), 1.0);
  EXPECT_EQ(imbalance(std::vector<Tokens>(3)), std::nullopt);
}

TEST(StepPlan, HasAtMostItsMicroStepsInFlight) {
  const LoadTable load = test::random_load({.micro_steps = 3}, 1);
  for (const auto& [asked, effective] : {std::pair{1, 1}, {2, 2}, {3, 3}, {99, 3}}) {
    const StepPlan plan = empty_plan({.in_flight = asked}, load);
    EXPECT_EQ(plan.in_flight, asked);
    EXPECT_EQ(plan.effective_in_flight(), effective);
  }
}

}  // namespace
}  // namespace foremoe
