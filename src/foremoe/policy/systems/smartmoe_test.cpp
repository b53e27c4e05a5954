#include "foremoe/policy/systems/smartmoe.h"

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
using testing::ElementsAre;

std::vector<int> placed(const std::vector<std::int64_t>& load, const std::vector<int>& current) {
  return smartmoe_placement(load, current, 2);
}

// As in the artifact's greedy_gen_mapping_from_history, the largest expert is first and goes to the least loaded rank.
TEST(SmartMoePlacement, PlacesTheLargestExpertOnTheLeastLoadedRankWithRoom) {
  EXPECT_THAT(placed({9, 8, 2, 1}, {0, 0, 1, 1}), ElementsAre(0, 1, 1, 0));  // 9 | 8, then 8 + 2, and 9 + 1
  EXPECT_THAT(placed({9, 1, 1, 1}, {0, 0, 1, 1}), ElementsAre(0, 1, 1, 0));
}

TEST(SmartMoePlacement, KeepsAnExpertOnItsRankOnTies) {
  EXPECT_THAT(placed({9, 8, 2, 1}, {1, 0, 0, 1}), ElementsAre(1, 0, 0, 1));
  EXPECT_THAT(placed({5, 5, 5, 5}, {0, 1, 1, 0}), ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(placed({0, 0, 0, 0}, {1, 1, 0, 0}), ElementsAre(1, 1, 0, 0));
}

// Two ranks, period 2, window 2. For the previous step's load, 9 8 2 1, {0 3} {1 2} is best, with 10 | 10; homes have
// 17 | 3. In two micro-steps of 1 9 9 1, the largest rank load is 36 with {0 3} {1 2} and 20 with the homes, which the
// pool restores. In two of 9 9 1 1, it is 36 with the homes. The greedy placement puts 0 and 1 on different ranks,
// which gives {0 3} {1 2} again, with 20.
TEST(SmartMoe, ChoosesFromThePoolByRecentLoads) {
  const LoadTable former = load_of(2, {{9, 8, 2, 1}});
  const LoadTable load = load_of(2, {{1, 9, 9, 1}, {1, 9, 9, 1}, {9, 9, 1, 1}, {9, 9, 1, 1}, {9, 9, 1, 1}});
  const StepPlan plan =
      plan_of(*make_smartmoe({.period = 2}), {.load = load, .guest_slots = 0, .previous_load = &former});
  EXPECT_EQ(plan.residency, Residency::kFree);
  for (const int t : {0, 1, 4}) {
    EXPECT_THAT(experts(plan, t, 0), ElementsAre(0, 3)) << t;
    EXPECT_THAT(experts(plan, t, 1), ElementsAre(2, 1)) << t;  // 2 keeps its home slot
  }
  for (const int t : {2, 3}) {
    EXPECT_THAT(experts(plan, t, 0), ElementsAre(0, 1)) << t;
    EXPECT_THAT(experts(plan, t, 1), ElementsAre(2, 3)) << t;
  }
  EXPECT_EQ(plan.max_load(1, 0), Tokens{18});
  EXPECT_EQ(plan.max_load(4, 0), Tokens{10});
}

TEST(SmartMoe, ComputesANewPlacementIfThePoolHasNoneBetter) {
  const LoadTable former = load_of(2, {{5, 5, 5, 5}});
  const LoadTable load = load_of(2, {{8, 7, 1, 1}, {8, 7, 1, 1}, {8, 7, 1, 1}});
  const StepPlan plan =
      plan_of(*make_smartmoe({.period = 2}), {.load = load, .guest_slots = 0, .previous_load = &former});
  EXPECT_THAT(experts(plan, 1, 0), ElementsAre(0, 1));
  EXPECT_EQ(plan.max_load(1, 0), Tokens{15});
  EXPECT_EQ(plan.max_load(2, 0), Tokens{9});
}

TEST(SmartMoe, KeepsItsPlacementIfNoneIsBetter) {
  const LoadTable load = load_of(2, test::ExpertLoads(20, {3, 1, 2, 2}));
  const StepPlan plan = plan_of(*make_smartmoe({.period = 1}), {.load = load});
  for (int t = 0; t < 20; ++t) EXPECT_THAT(experts(plan, t, 0), ElementsAre(0, 1, -1));
}

TEST(SmartMoe, NeverReplicatesAndLeavesGuestSlotsEmpty) {
  const LoadTable load = test::random_load({.micro_steps = 12, .ranks = 4, .experts = 16}, 3);
  const StepPlan plan = plan_of(*make_smartmoe({.period = 3}), {.load = load, .guest_slots = 2});
  for (int t = 0; t < plan.num_events(); ++t) {
    std::vector<int> num_replicas(16);
    for (int r = 0; r < 4; ++r) {
      const std::vector<int> held = experts(plan, t, r);
      EXPECT_EQ(std::ranges::count(held, -1), 2);
      for (const int e : held) {
        if (e >= 0) ++num_replicas[e];
      }
    }
    EXPECT_THAT(num_replicas, testing::Each(1));
  }
}

}  // namespace
}  // namespace foremoe
