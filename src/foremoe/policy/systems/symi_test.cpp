#include "foremoe/policy/systems/symi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "foremoe/core/random.h"
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

std::vector<int> counts(const std::vector<std::int64_t>& load, int num_slots) {
  return symi_replica_counts(load, num_slots);
}

TEST(SymiReplicaCounts, AreProportionalToTheLoad) {
  EXPECT_THAT(counts({50, 25, 25, 100}, 8), ElementsAre(2, 1, 1, 4));
  EXPECT_THAT(counts({40, 40, 20}, 4), ElementsAre(2, 1, 1));       // 1.6, 1.6, 0.8: the first of two deficits of 0.6
  EXPECT_THAT(counts({97, 1, 1, 1}, 6), ElementsAre(3, 1, 1, 1));   // 5.82, less the minimum of the others
  EXPECT_THAT(counts({45, 45, 5, 5}, 5), ElementsAre(1, 2, 1, 1));  // 2.25, 2.25, 0.25, 0.25
  EXPECT_THAT(counts({0, 0, 0}, 7), ElementsAre(3, 2, 2));          // no load: equal counts
}

TEST(SymiReplicaCounts, FillAllSlotsAndLeaveOutNoExpert) {
  Random random(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<std::int64_t> load(1 + random.below(40));
    for (auto& tokens : load) tokens = static_cast<std::int64_t>(std::pow(10.0, 9 * random.uniform()));
    const int num_slots = static_cast<int>(load.size() + random.below(60));
    const std::vector<int> given = counts(load, num_slots);
    EXPECT_EQ(std::accumulate(given.begin(), given.end(), 0), num_slots);
    EXPECT_GE(std::ranges::min(given), 1);
    // An expert with more tokens has at most one replica less than another, due to rounding.
    for (std::size_t a = 0; a < load.size(); ++a) {
      for (std::size_t b = 0; b < load.size(); ++b) {
        if (load[a] >= load[b]) {
          EXPECT_GE(given[a] + 1, given[b]);
        }
      }
    }
  }
}

// Two ranks with three slots, experts in consecutive slots. Before the first micro-step, counts are 2 2 1 1: {0 0 1} {1
// 2 3}, with loads 50 + 15 and 15 + 15 + 5. Then loads 50 : 30 : 15 : 5 give counts 3 1 1 1: {0 0 0} {1 2 3}, balanced.
TEST(Symi, FollowsThePreviousMicroStep) {
  const LoadTable load = load_of(2, {{50, 30, 15, 5}, {50, 30, 15, 5}});
  const StepPlan plan = plan_of(*make_symi(), {.load = load});
  EXPECT_EQ(plan.residency, Residency::kFree);
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 1, -1));  // replicas of one expert on one rank are merged
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(50, 15, 0));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(15, 5, 15));  // 2 3 1: homes keep their slots
  EXPECT_THAT(experts(plan, 1, 0), ElementsAre(0, -1, -1));
  EXPECT_EQ(plan.max_load(0, 0), Tokens{65});
  EXPECT_EQ(plan.max_load(1, 0), Tokens{50});
}

TEST(Symi, StartsFromTheEndOfThePreviousStep) {
  const LoadTable load = load_of(2, {{50, 30, 15, 5}});
  const LoadTable former = load_of(2, {{5, 5, 45, 45}, {50, 30, 15, 5}});
  EXPECT_EQ(plan_of(*make_symi(), {.load = load, .previous_load = &former}).max_load(0, 0), Tokens{50});
  // An iteration has two micro-steps. Loads 55 35 60 50 are 1.65 1.05 1.8 1.5 of six slots, so {0 0 1} {2 2 3}.
  const StepPlan plan = plan_of(*make_symi({.micro_steps_per_iteration = 2}), {.load = load, .previous_load = &former});
  EXPECT_EQ(plan.max_load(0, 0), Tokens{80});
}

TEST(Symi, KeepsItsPlacementForAnIterationAndNeverLooksAhead) {
  LoadTable load = test::random_load({.micro_steps = 7, .ranks = 4, .experts = 16}, 1);
  const StepPlan before = plan_of(*make_symi({.micro_steps_per_iteration = 3}), {.load = load, .guest_slots = 3});
  for (Tokens& t : load.load.view()[3].flat()) t = Tokens{1000 - t.value};
  const StepPlan after = plan_of(*make_symi({.micro_steps_per_iteration = 3}), {.load = load, .guest_slots = 3});
  const auto slots = [](const StepPlan& plan, int t) { return plan.slot_expert.view()[t].flat(); };
  EXPECT_TRUE(std::ranges::equal(slots(before, 0), slots(before, 2)));
  EXPECT_FALSE(std::ranges::equal(slots(before, 2), slots(before, 3)));
  EXPECT_TRUE(std::ranges::equal(slots(before, 3), slots(before, 5)));
  EXPECT_TRUE(std::ranges::equal(slots(before, 5), slots(after, 5)));
  EXPECT_FALSE(std::ranges::equal(slots(before, 6), slots(after, 6)));
}

}  // namespace
}  // namespace foremoe
