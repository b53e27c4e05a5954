#include "foremoe/evaluate/memory_budget.h"

#include <gtest/gtest.h>

#include <array>

namespace foremoe {
namespace {

constexpr std::array kTrials{ResidencyTrial{10, Bytes{80}}, ResidencyTrial{8, Bytes{100}}, ResidencyTrial{9, Bytes{60}},
                             ResidencyTrial{9, Bytes{50}}};

TEST(ChooseResidencyTest, ReturnsTheQuickestWithoutABudget) {
  EXPECT_EQ(choose_residency(kTrials, std::nullopt).trial, 1);
}

TEST(ChooseResidencyTest, ReturnsTheQuickestThatFitsAndTheSmallerOfTwoEquals) {
  EXPECT_EQ(choose_residency(kTrials, Bytes{100}).trial, 1);
  EXPECT_EQ(choose_residency(kTrials, Bytes{99}).trial, 3);
  EXPECT_TRUE(choose_residency(kTrials, Bytes{50}).fits);
}

TEST(ChooseResidencyTest, ReturnsTheSmallestIfNoneFits) {
  const ResidencyChoice choice = choose_residency(kTrials, Bytes{49});
  EXPECT_EQ(choice.trial, 3);
  EXPECT_FALSE(choice.fits);
}

TEST(LargestMicroBatch, FillsTheBudgetWithActivations) {
  SimulatedStep step;
  step.recompute.memory = {.state = Bytes{100}, .activations = Bytes{10}};
  step.policy_update.memory = {.state = Bytes{100}, .guest_weights = Bytes{50}, .activations = Bytes{50}};
  EXPECT_EQ(largest_micro_batch(step, Bytes{250}, Tokens{1000}), Tokens{2000});  // 100 bytes left; 1000 tokens use 50
  EXPECT_EQ(largest_micro_batch(step, Bytes{150}, Tokens{1000}), Tokens{0});
}

}  // namespace
}  // namespace foremoe
