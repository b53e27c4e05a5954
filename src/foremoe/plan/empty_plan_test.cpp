#include "foremoe/plan/empty_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/plan/test_plans.h"

namespace foremoe {
namespace {

// 3 micro-steps, two in flight: 6 events. 8 experts on 4 ranks and one guest slot: 3 slots.
TEST(EmptyPlan, HasTheShapeOfTheLoadAndNothingInItsSlots) {
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

}  // namespace
}  // namespace foremoe
