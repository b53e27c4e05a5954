#include "foremoe/policy/systems/halve_gap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

// Homes have 70, 30 and 20 tokens. Rank 2 serves half of 70 − 20 for rank 0. plan_of() calls check_plan().
TEST(HalveGap, HalvesTheDifferenceBetweenMostAndFewestTokens) {
  const LoadTable load = test::load_of(3, {{40, 30, 20, 10, 10, 10}});
  const StepPlan plan = test::plan_of(*make_halve_gap(), {.load = load});
  EXPECT_THAT(test::tokens(plan, 0, 0), ElementsAre(15, 30, 0));
  EXPECT_THAT(test::tokens(plan, 0, 1), ElementsAre(20, 10, 0));
  EXPECT_THAT(test::tokens(plan, 0, 2), ElementsAre(10, 10, 25));
}

TEST(HalveGap, NeverRaisesTheLargestLoad) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const LoadTable load = test::random_load({.ranks = 6, .experts = 12}, seed);
    const StepPlan before = test::plan_of(*make_halve_gap(), {.load = load, .guest_slots = 0});
    const StepPlan after = test::plan_of(*make_halve_gap(), {.load = load});
    for (std::size_t i = 0; i < after.max_load.size(); ++i) {
      EXPECT_LE(after.max_load.flat()[i], before.max_load.flat()[i]);
    }
  }
}

}  // namespace
}  // namespace foremoe
