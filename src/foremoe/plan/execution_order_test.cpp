#include "foremoe/plan/execution_order.h"

#include <gtest/gtest.h>

#include <string>

namespace foremoe {
namespace {

std::string spell(const ExecutionOrder& order) {
  std::string text;
  for (int t = 0; t < order.num_events(); ++t) {
    text += (order.pass[t] == Pass::kForward ? " F" : " B") + std::to_string(order.micro_step[t].value);
  }
  return text;
}

TEST(ExecutionOrder, WithOneInFlightBothPassesShareTheMicroStepsEvent) {
  const ExecutionOrder order = make_execution_order(3, 1);
  EXPECT_EQ(spell(order), " F0 F1 F2");
  EXPECT_EQ(order.forward, order.backward);
}

TEST(ExecutionOrder, WithMoreInFlightForwardsLeadBackwardsByThatMany) {
  EXPECT_EQ(spell(make_execution_order(4, 2)), " F0 F1 B0 F2 B1 F3 B2 B3");
  EXPECT_EQ(spell(make_execution_order(5, 4)), " F0 F1 F2 F3 B0 F4 B1 B2 B3 B4");
}

TEST(ExecutionOrder, MoreInFlightThanMicroStepsRunsAllForwardsFirst) {
  EXPECT_EQ(spell(make_execution_order(2, 8)), " F0 F1 B0 B1");
  EXPECT_EQ(spell(make_execution_order(1, 2)), " F0 B0");
  EXPECT_EQ(make_execution_order(0, 2).num_events(), 0);
}

TEST(ExecutionOrder, NeverHasMoreMicroStepsInFlightThanAsked) {
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

}  // namespace
}  // namespace foremoe
