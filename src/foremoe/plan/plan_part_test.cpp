#include "foremoe/plan/plan_part.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/test_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

// Two in flight run F0 F1 B0 F2 B1 B2: without micro-step 2 that is F0 F1 B0 B1, events 0, 1, 2 and 4.
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

TEST(PlanPart, IsARightPlanForThePartOfTheLoad) {
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

TEST(PlanPart, LeavesOutWhatThePlanDoesNotRecord) {
  const LoadTable load = test::random_load({}, 1);
  StepPlan whole = test::random_plan(load, {}, 1);
  whole.max_load = whole.lower_bound = {};
  const StepPlan first = take_first(whole, take_first(load, 1, 1));
  EXPECT_TRUE(first.max_load.empty());
  EXPECT_TRUE(first.lower_bound.empty());
}

}  // namespace
}  // namespace foremoe
