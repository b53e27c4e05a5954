#include "foremoe/policy/echo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/plan/test_plans.h"
#include "foremoe/planner/test_steps.h"
#include "foremoe/policy/test_policy_runs.h"

namespace foremoe {
namespace {

using test::experts;
using test::load_of;
using test::plan_of;
using test::tokens;
using testing::ElementsAre;

std::unique_ptr<Policy> one_shot(int slots_per_rank) {
  return make_echo({.assign = EchoOptions::Assign::kOneShot, .slots_per_rank = slots_per_rank});
}

// Mean 60. Rank 0 keeps its smallest, 10 and 30, and 20 of e2, which spills 30; rank 1 has room for 30.
TEST(Echo, SpillsTheLargestExpertsOfARankAboveTheMeanAsWorkedByHand) {
  const LoadTable load = load_of(2, {{10, 30, 50, 10, 10, 10}});
  const StepPlan plan = plan_of(*make_echo(), {.load = load});
  EXPECT_EQ(plan.residency, Residency::kShared);
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(10, 30, 20, 0));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(3, 4, 5, 2));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(10, 10, 10, 30));
}

// Mean 700, buckets of width 100; e0 spills 396, e1 308, both in bucket 4 (400 to 301); eight ranks have room for 88.
// e0 goes first and comes back with 308, behind e1: so e1 is next, then e0 again.
TEST(Echo, PacksTheLargestBucketFirstAndInsideABucketFirstComeFirstServed) {
  const LoadTable load = load_of(10, {{1096, 1008, 612, 612, 612, 612, 612, 612, 612, 612}});
  const StepPlan plan = plan_of(*make_echo(), {.load = load});
  std::vector<int> guests;
  for (int r = 2; r < 10; ++r) {
    guests.push_back(experts(plan, 0, r).back());
    EXPECT_LE(tokens(plan, 0, r).back(), 88);
  }
  // Left of e0 and e1: 396 308, 308 308, 308 220, 220 220, where e1 entered bucket 5 before e0, and so on.
  EXPECT_THAT(guests, ElementsAre(0, 1, 0, 1, 0, 1, 0, 1));
}

TEST(Echo, UsesOneSlotHoweverManyThereAreAndNoneWhenThereIsNone) {
  const LoadTable load = test::random_load({.ranks = 4, .experts = 32}, 1, 400);
  const StepPlan one = plan_of(*make_echo(), {.load = load});
  EXPECT_EQ(plan_of(*make_echo(), {.load = load, .guest_slots = 3}).max_load, one.max_load);
  EXPECT_EQ(plan_figures(plan_of(*make_echo(), {.load = load, .guest_slots = 0}), load).copies, 0);
}

// Mean 100: spills of 50 and 30 side by side with rooms of 60 and 20: e0 50, e1 10 | e1 20.
TEST(Echo, KeepsTheLargestOverlapsInOneShot) {
  const LoadTable load = load_of(4, {{150, 130, 40, 80}});
  const StepPlan one = plan_of(*one_shot(1), {.load = load, .guest_slots = 2});
  EXPECT_THAT(tokens(one, 0, 1), ElementsAre(110, 0, 0));
  EXPECT_THAT(tokens(one, 0, 2), ElementsAre(40, 50, 0));
  EXPECT_THAT(tokens(one, 0, 3), ElementsAre(80, 20, 0));
  const StepPlan two = plan_of(*one_shot(2), {.load = load, .guest_slots = 2});
  EXPECT_THAT(tokens(two, 0, 1), ElementsAre(100, 0, 0));
  EXPECT_THAT(tokens(two, 0, 2), ElementsAre(40, 50, 10));
  EXPECT_EQ(plan_of(*one_shot(2), {.load = load, .guest_slots = 1}).max_load, one.max_load);
}

TEST(Echo, NeverMakesARankSlowerThanItWasOrThanTheMean) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const LoadTable load = test::random_load({.ranks = 6, .experts = 24}, seed, 400);
    const StepPlan before = plan_of(*make_echo(), {.load = load, .guest_slots = 0});
    for (const auto& policy : {make_echo(), one_shot(1), one_shot(3)}) {
      const StepPlan after = plan_of(*policy, {.load = load, .guest_slots = 3});
      for (std::size_t i = 0; i < after.max_load.size(); ++i) {
        EXPECT_LE(after.max_load.flat()[i], std::max(before.max_load.flat()[i], before.lower_bound.flat()[i]));
      }
    }
    // With a slot for every overlap all that spills has room, but for the remainder of the mean.
    const StepPlan all = plan_of(*one_shot(20), {.load = load, .guest_slots = 20});
    for (std::size_t i = 0; i < all.max_load.size(); ++i) {
      EXPECT_LE(all.max_load.flat()[i].value, all.lower_bound.flat()[i].value + load.num_ranks());
    }
  }
}

TEST(Echo, CopiesAfterTheRouter) { EXPECT_TRUE(make_echo()->online().copies_after_router); }

}  // namespace
}  // namespace foremoe
