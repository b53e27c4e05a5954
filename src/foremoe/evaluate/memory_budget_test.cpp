#include "foremoe/evaluate/memory_budget.h"

#include <gtest/gtest.h>

namespace foremoe {
namespace {

TEST(LargestMicroBatch, FillsTheBudgetWithActivations) {
  SimulatedStep step;
  step.recompute.memory = {.state = Bytes{100}, .activations = Bytes{10}};
  step.policy_update.memory = {.state = Bytes{100}, .guest_weights = Bytes{50}, .activations = Bytes{50}};
  EXPECT_EQ(largest_micro_batch(step, Bytes{250}, Tokens{1000}), Tokens{2000});  // 100 bytes left; 1000 tokens use 50
  EXPECT_EQ(largest_micro_batch(step, Bytes{150}, Tokens{1000}), Tokens{0});
}

}  // namespace
}  // namespace foremoe
