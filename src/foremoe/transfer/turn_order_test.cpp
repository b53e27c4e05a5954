#include "foremoe/transfer/turn_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "foremoe/core/error.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

StepPlan plan_of(int micro_steps, int layers, int in_flight, Residency residency = Residency::kResident) {
  const LoadTable load = test::random_load({.micro_steps = micro_steps, .layers = layers}, 1);
  return test::random_plan(load, {.residency = residency, .in_flight = in_flight}, 1);
}

// "F0.1" is the forward pass of micro-step 0, layer 1.
std::vector<std::string> words(const TurnOrder& order) {
  std::vector<std::string> result;
  for (const Turn& turn : order.turns) {
    result.push_back((turn.pass == Pass::kForward ? "F" : "B") + std::to_string(turn.micro_step.value) + "." +
                     std::to_string(turn.layer.value));
  }
  return result;
}

std::vector<int> numbers(const Array<TurnId, 2>& turns) {
  std::vector<int> result;
  for (const TurnId t : turns.flat()) result.push_back(t.value);
  return result;
}

using testing::ElementsAre;
using testing::HasSubstr;

TEST(TurnOrder, RecomputeVisitsLayersInAscendingOrder) {
  const TurnOrder order = make_turn_order(plan_of(2, 3, 1), Phase::kRecompute);
  EXPECT_THAT(words(order), ElementsAre("F0.0", "F0.1", "F0.2", "F1.0", "F1.1", "F1.2"));
  EXPECT_THAT(numbers(order.forward), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_TRUE(order.backward.empty());
  EXPECT_THAT(numbers(order.first), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(numbers(order.last), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(TurnOrder, WithOneInFlightForwardAndBackwardShareAnEvent) {
  const TurnOrder order = make_turn_order(plan_of(2, 2, 1), Phase::kPolicyUpdate);
  EXPECT_THAT(words(order), ElementsAre("F0.0", "F0.1", "B0.1", "B0.0", "F1.0", "F1.1", "B1.1", "B1.0"));
  EXPECT_THAT(numbers(order.forward), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(numbers(order.backward), ElementsAre(3, 2, 7, 6));
  EXPECT_THAT(numbers(order.first), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(numbers(order.last), ElementsAre(3, 2, 7, 6));
  EXPECT_EQ(order[TurnId{6}], (Turn{EventId{1}, Pass::kBackward, MicroStepId{1}, LayerId{1}}));
}

TEST(TurnOrder, WithMoreInFlightEachPassHasItsOwnEvent) {
  const TurnOrder order = make_turn_order(plan_of(3, 2, 2), Phase::kPolicyUpdate);
  EXPECT_THAT(words(order), ElementsAre("F0.0", "F0.1", "F1.0", "F1.1", "B0.1", "B0.0", "F2.0", "F2.1", "B1.1", "B1.0",
                                        "B2.1", "B2.0"));
  EXPECT_THAT(numbers(order.forward), ElementsAre(0, 1, 2, 3, 6, 7));
  EXPECT_THAT(numbers(order.backward), ElementsAre(5, 4, 9, 8, 11, 10));
  EXPECT_THAT(numbers(order.first), ElementsAre(0, 1, 2, 3, 5, 4, 6, 7, 9, 8, 11, 10));
  EXPECT_EQ(order.first, order.last);
  EXPECT_EQ(order[TurnId{5}].event, EventId{2});
}

TEST(TurnOrder, WithMoreInFlightThanMicroStepsEachPassHasItsOwnEvent) {
  const TurnOrder order = make_turn_order(plan_of(1, 2, 4), Phase::kPolicyUpdate);
  EXPECT_THAT(words(order), ElementsAre("F0.0", "F0.1", "B0.1", "B0.0"));
  EXPECT_THAT(numbers(order.first), ElementsAre(0, 1, 3, 2));
}

template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(TurnOrder, RejectsRecomputeWithAPolicyUpdatePlanAndNamesTheEvent) {
  const StepPlan plan = plan_of(3, 2, 2);
  const std::string why = refusal([&] { make_turn_order(plan, Phase::kRecompute); });
  EXPECT_THAT(why, HasSubstr("event_pass[2]"));
  EXPECT_THAT(why, HasSubstr("2 micro-steps in flight"));
}

TEST(TurnOrder, RejectsPolicyUpdateUnderFree) {
  const StepPlan plan = plan_of(2, 2, 1, Residency::kFree);
  EXPECT_THAT(refusal([&] { make_turn_order(plan, Phase::kPolicyUpdate); }), HasSubstr("residency"));
  EXPECT_EQ(make_turn_order(plan, Phase::kRecompute).size(), 4);
}

TEST(TurnOrder, PhasesAreNamedAsOnTheCommandLine) {
  EXPECT_EQ(to_string(Phase::kRecompute), "recompute");
  EXPECT_EQ(to_string(Phase::kPolicyUpdate), "policy_update");
}

}  // namespace
}  // namespace foremoe
