#include "foremoe/runtime/critical_path.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "foremoe/core/random.h"

namespace foremoe {
namespace {

constexpr std::size_t kRepeats = 5;  // default of `foremoe run`
constexpr std::size_t kTurns = 56;
constexpr std::size_t kRanks = 8;

// Time of a forward or backward turn, in seconds. Shares no code with the product.
double true_seconds(bool backward, std::int64_t calls, std::int64_t rows) {
  const auto c = static_cast<double>(calls), r = static_cast<double>(rows);
  return backward ? 4e-6 * c + 3.1e-7 * r : 1e-6 * c + 1.7e-7 * r;
}

struct Timed {
  TurnTable turns;
  double path = 0;  // true path, without noise
};

// Draws timings. `excess` is the relative excess of the busiest rank over the mean; with 0, all ranks are within 0.4 %
// of each other. Noise adds an exponential delay with mean `noise`, relative to the true time.
Timed timed(double excess, double noise, Random& random) {
  Timed result{.turns = {.compute_seconds = Array<double, 3>({kRepeats, kTurns, kRanks}),
                         .calls = Array<std::int64_t, 2>({kTurns, kRanks}),
                         .rows = Array<std::int64_t, 2>({kTurns, kRanks})}};
  TurnTable& turns = result.turns;
  for (std::size_t t = 0; t < kTurns; ++t) {
    turns.pass.push_back(t % 2 == 0 ? Pass::kForward : Pass::kBackward);
    const double mean = 6000 + 3000 * random.uniform();
    const std::size_t busiest = random.below(kRanks);
    double slowest = 0;
    for (std::size_t r = 0; r < kRanks; ++r) {
      const double share = r == busiest ? 1 + excess : 1 - excess / (kRanks - 1) * (0.5 + random.uniform());
      turns.rows(t, r) = std::llround(mean * share * (1 + 0.004 * (random.uniform() - 0.5)));
      turns.calls(t, r) = 16 + static_cast<std::int64_t>(excess == 0 ? random.below(2) : 0);
      const double seconds = true_seconds(t % 2 != 0, turns.calls(t, r), turns.rows(t, r));
      slowest = std::max(slowest, seconds);
      for (std::size_t i = 0; i < kRepeats; ++i) {
        turns.compute_seconds(i, t, r) = seconds * (1 - noise * std::log(1 - random.uniform()));
      }
    }
    result.path += slowest;
  }
  return result;
}

// Baseline that the estimator replaces: per turn, the largest rank's least time over all repeats.
double largest_least(const TurnTable& turns) {
  double path = 0;
  for (std::size_t t = 0; t < kTurns; ++t) {
    double slowest = 0;
    for (std::size_t r = 0; r < kRanks; ++r) {
      double least = turns.compute_seconds(0, t, r);
      for (std::size_t i = 1; i < kRepeats; ++i) least = std::min(least, turns.compute_seconds(i, t, r));
      slowest = std::max(slowest, least);
    }
    path += slowest;
  }
  return path;
}

TEST(FittedCriticalPath, EstimatesTheGainWithinFivePercentUnlikeTheMaximumOfNoisyTimes) {
  for (const double noise : {0.1, 0.3, 0.6}) {
    double bias = 0;
    constexpr int kSeeds = 20;
    for (int seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(testing::Message() << "noise " << noise << ", seed " << seed);
      Random random(static_cast<std::uint64_t>(seed));
      const Timed before = timed(0.44, noise, random);
      const Timed after = timed(0, noise, random);
      const double gain = after.path / before.path;
      const double fitted = fitted_critical_path(after.turns).seconds / fitted_critical_path(before.turns).seconds;
      EXPECT_NEAR(fitted / gain, 1, 0.05);
      bias += (largest_least(after.turns) / largest_least(before.turns) / gain - 1) / kSeeds;
    }
    if (noise >= 0.3) {
      EXPECT_GT(bias, 0.07) << "the replaced figure has become right at noise " << noise;
    }
  }
}

TEST(FittedCriticalPath, EqualsTheTruePathWithoutNoise) {
  Random random(1);
  const Timed run = timed(0.3, 0, random);
  const CriticalPath path = fitted_critical_path(run.turns);
  EXPECT_NEAR(path.seconds / run.path, 1, 1e-6);
  EXPECT_NEAR(path.spread, 0, 1e-6);
}

TEST(FittedCriticalPath, IgnoresOutliersThatOccurInEveryRepeat) {
  Random random(2);
  Timed run = timed(0.3, 0.02, random);
  for (std::size_t t = 0; t < kTurns; t += 7) {
    for (std::size_t i = 0; i < kRepeats; ++i) run.turns.compute_seconds(i, t, t % kRanks) *= 10;
  }
  EXPECT_NEAR(fitted_critical_path(run.turns).seconds / run.path, 1, 0.02);
}

TEST(FittedCriticalPath, ReportsTheSpreadOfRepeats) {
  Random random(3);
  Timed run = timed(0.3, 0, random);
  for (double& seconds : run.turns.compute_seconds[1].flat()) seconds *= 1.2;
  EXPECT_NEAR(fitted_critical_path(run.turns).spread, 0.1, 1e-4);
}

TEST(FittedCriticalPath, IsZeroIfNothingRan) {
  const TurnTable turns{.pass = {Pass::kForward},
                        .compute_seconds = Array<double, 3>({2, 1, 3}),
                        .calls = Array<std::int64_t, 2>({1, 3}),
                        .rows = Array<std::int64_t, 2>({1, 3})};
  EXPECT_EQ(fitted_critical_path(turns).seconds, 0);
  EXPECT_EQ(fitted_critical_path(turns).spread, 0);
}

TEST(FittedExpertCost, UsesOnlyRowsIfCallsAreCollinear) {
  const std::vector<ExpertTiming> timings{{.seconds = 2, .calls = 1, .rows = 10},
                                          {.seconds = 4, .calls = 2, .rows = 20}};
  const ExpertCost cost = fit_expert_cost(timings);
  EXPECT_EQ(cost.per_call, 0);
  EXPECT_NEAR(cost.per_row, 0.2, 1e-9);
}

TEST(FittedExpertCost, IsNeverNegative) {
  // More calls take less time here: unconstrained least squares would give a negative cost per call.
  const std::vector<ExpertTiming> timings{{.seconds = 3, .calls = 1, .rows = 10},
                                          {.seconds = 2.5, .calls = 5, .rows = 10},
                                          {.seconds = 2, .calls = 9, .rows = 10}};
  const ExpertCost cost = fit_expert_cost(timings);
  EXPECT_GE(cost.per_call, 0);
  EXPECT_NEAR(cost.of(5, 10), 2.5, 0.5);
}

}  // namespace
}  // namespace foremoe
