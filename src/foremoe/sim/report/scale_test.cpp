#include "foremoe/sim/report/scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace foremoe::report {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

TEST(Scale, MapsTheDomainOntoTheRange) {
  const Scale scale({.begin = 10, .end = 20}, {.begin = 100, .end = 300});
  EXPECT_DOUBLE_EQ(scale(10), 100);
  EXPECT_DOUBLE_EQ(scale(15), 200);
  EXPECT_DOUBLE_EQ(scale(20), 300);
}

TEST(Scale, ARangeMayRunUpwards) {
  const Scale scale({.begin = 0, .end = 4}, {.begin = 200, .end = 0});
  EXPECT_DOUBLE_EQ(scale(1), 150);
}

TEST(Scale, EqualRatiosAreEquallyFarApartOnALogarithmicAxis) {
  const Scale scale({.begin = 1, .end = 16}, {.begin = 0, .end = 400}, Scale::Kind::kLogarithmic);
  EXPECT_NEAR(scale(2), 100, 1e-9);
  EXPECT_NEAR(scale(4), 200, 1e-9);
  EXPECT_NEAR(scale(8), 300, 1e-9);
}

TEST(Scale, NothingIsDrawnOutsideOfThePlot) {
  const Scale scale({.begin = 1, .end = 2}, {.begin = 0, .end = 50});
  EXPECT_DOUBLE_EQ(scale(-7), 0);
  EXPECT_DOUBLE_EQ(scale(1e300), 50);
  EXPECT_DOUBLE_EQ(scale(std::numeric_limits<double>::infinity()), 50);
  EXPECT_DOUBLE_EQ(scale(std::nan("")), 25);
}

TEST(Scale, OneValueAloneStandsInTheMiddle) {
  EXPECT_DOUBLE_EQ(Scale({.begin = 3, .end = 3}, {.begin = 0, .end = 50})(3), 25);
}

TEST(Ticks, AreRoundAndNotTooMany) {
  EXPECT_THAT(ticks({.begin = 0, .end = 10}, 6), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(ticks({.begin = 61.3, .end = 66.9}, 4), ElementsAre(62, 64, 66));
  EXPECT_THAT(ticks({.begin = 0, .end = 0.31}, 5), Pointwise(DoubleNear(1e-12), {0.0, 0.1, 0.2, 0.3}));
  EXPECT_THAT(ticks({.begin = -1, .end = 1}, 3), ElementsAre(-1, 0, 1));
}

TEST(Ticks, ZeroHasNoSign) {
  for (const double tick : ticks({.begin = 0, .end = 1}, 5)) EXPECT_FALSE(std::signbit(tick));
}

TEST(Ticks, AreAtMostAsManyAsAskedForWhateverTheDomain) {
  for (double end = 1e-7; end < 1e15; end *= 1.37) {
    for (const int most : {2, 4, 7}) {
      const auto at = ticks({.begin = 0, .end = end}, most);
      EXPECT_LE(static_cast<int>(at.size()), most) << end;
      EXPECT_GE(at.size(), 1U) << end;
      EXPECT_LE(at.back(), end * (1 + 1e-9));
    }
  }
}

TEST(Ticks, LogarithmicOnesAreOneTwoAndFiveTimesPowersOfTen) {
  EXPECT_THAT(logarithmic_ticks({.begin = 1, .end = 60}, 9), ElementsAre(1, 2, 5, 10, 20, 50));
  EXPECT_THAT(logarithmic_ticks({.begin = 1, .end = 1e6}, 8), ElementsAre(1, 10, 100, 1e3, 1e4, 1e5, 1e6));
}

TEST(Ticks, ANarrowLogarithmicAxisHasRoundValues) {
  EXPECT_THAT(logarithmic_ticks({.begin = 1, .end = 1.4}, 6), Pointwise(DoubleNear(1e-12), {1.0, 1.1, 1.2, 1.3, 1.4}));
}

TEST(Ticks, ADomainOfOneValueHasOneTick) { EXPECT_THAT(ticks({.begin = 5, .end = 5}, 4), ElementsAre(5)); }

TEST(Rounded, ReachesTheNextRoundValue) {
  const Interval round = rounded({.begin = 0, .end = 73}, 6);
  EXPECT_DOUBLE_EQ(round.begin, 0);
  EXPECT_DOUBLE_EQ(round.end, 80);
}

}  // namespace
}  // namespace foremoe::report
