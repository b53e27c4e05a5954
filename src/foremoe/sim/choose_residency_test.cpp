#include "foremoe/sim/simulation.h"

#include <gtest/gtest.h>

#include <array>

namespace foremoe {
namespace {

constexpr std::array kTrials{ResidencyTrial{10, Bytes{80}}, ResidencyTrial{8, Bytes{100}}, ResidencyTrial{9, Bytes{60}},
                             ResidencyTrial{9, Bytes{50}}};

TEST(ChooseResidencyTest, TheQuickestWhereMemoryIsNoObject) {
  EXPECT_EQ(choose_residency(kTrials, std::nullopt).trial, 1);
}

TEST(ChooseResidencyTest, TheQuickestThatFitsAndTheSmallerOfTwo) {
  EXPECT_EQ(choose_residency(kTrials, Bytes{100}).trial, 1);
  EXPECT_EQ(choose_residency(kTrials, Bytes{99}).trial, 3);
  EXPECT_TRUE(choose_residency(kTrials, Bytes{50}).fits);
}

TEST(ChooseResidencyTest, TheSmallestWhereNoneFits) {
  const ResidencyChoice choice = choose_residency(kTrials, Bytes{49});
  EXPECT_EQ(choice.trial, 3);
  EXPECT_FALSE(choice.fits);
}

}  // namespace
}  // namespace foremoe
