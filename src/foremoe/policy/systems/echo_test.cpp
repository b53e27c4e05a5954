#include "foremoe/policy/systems/echo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::experts;
using test::load_of;
using test::plan_of;
using test::tokens;
using testing::ElementsAre;

// The mean is 60. Rank 0 serves 10, 30 and 20 tokens of its experts; e2 spills 30. Rank 1 has room for 30.
TEST(Echo, SpillsTheLargestExpertsOfARankAboveTheMean) {
  const LoadTable load = load_of(2, {{10, 30, 50, 10, 10, 10}});
  const StepPlan plan = plan_of(*make_echo(), {.load = load});
  EXPECT_EQ(plan.residency, Residency::kShared);
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(10, 30, 20, 0));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(3, 4, 5, 2));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(10, 10, 10, 30));
}

// The mean is 700, the bucket width 100. e0 spills 396 and e1 308, both in bucket 4 (400 to 301); eight ranks have room
// for 88. e0 is packed first and rejoins the bucket with 308, behind e1. So e1 is next, then e0 again.
TEST(Echo, PacksTheLargestBucketFirstInFifoOrder) {
  const LoadTable load = load_of(10, {{1096, 1008, 612, 612, 612, 612, 612, 612, 612, 612}});
  const StepPlan plan = plan_of(*make_echo(), {.load = load});
  std::vector<int> guests;
  for (int r = 2; r < 10; ++r) {
    guests.push_back(experts(plan, 0, r).back());
    EXPECT_LE(tokens(plan, 0, r).back(), 88);
  }
  // Remaining e0 and e1: 396 308, 308 308, 308 220, 220 220, … At 220 220, e1 is first in bucket 5.
  EXPECT_THAT(guests, ElementsAre(0, 1, 0, 1, 0, 1, 0, 1));
}

TEST(Echo, UsesAtMostOneSlotPerRank) {
  const LoadTable load = test::random_load({.ranks = 4, .experts = 32}, 1, 400);
  const StepPlan one = plan_of(*make_echo(), {.load = load});
  EXPECT_EQ(plan_of(*make_echo(), {.load = load, .guest_slots = 3}).max_load, one.max_load);
  EXPECT_EQ(plan_figures(plan_of(*make_echo(), {.load = load, .guest_slots = 0}), load).copies, 0);
}

TEST(Echo, NeverRaisesTheLargestLoadAboveTheMean) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const LoadTable load = test::random_load({.ranks = 6, .experts = 24}, seed, 400);
    const StepPlan before = plan_of(*make_echo(), {.load = load, .guest_slots = 0});
    const StepPlan after = plan_of(*make_echo(), {.load = load, .guest_slots = 3});
    for (std::size_t i = 0; i < after.max_load.size(); ++i) {
      EXPECT_LE(after.max_load.flat()[i], std::max(before.max_load.flat()[i], before.lower_bound.flat()[i]));
    }
  }
}

TEST(Echo, CopiesAfterTheRouter) { EXPECT_TRUE(make_echo()->online().copies_after_router); }

}  // namespace
}  // namespace foremoe
