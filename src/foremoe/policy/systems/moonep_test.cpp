#include "foremoe/policy/systems/moonep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

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

// Homes of two experts have 80, 40, 20 and 20 tokens; the capacity is 40. Rank 0 has a surplus of 40, ranks 2 and 3 a
// deficit of 20 each. e0 has the most tokens left (50). After the first pair it ties with e1 (30) and has the lower id.
TEST(Moonep, PairsSurplusWithDeficit) {
  const LoadTable load = load_of(4, {{50, 30, 25, 15, 10, 10, 12, 8}});
  const StepPlan plan = plan_of(*make_moonep(), {.load = load});
  EXPECT_EQ(plan.residency, Residency::kShared);
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(10, 30, 0));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(25, 15, 0));
  for (int r = 2; r < 4; ++r) {
    EXPECT_EQ(experts(plan, 0, r).back(), 0);
    EXPECT_EQ(tokens(plan, 0, r).back(), 20);
  }
}

// Balances are 10, 20, −30. Rank 1 fills rank 2 and then lacks 10 tokens, which rank 0 sends.
TEST(Moonep, FillsARankThatGaveMoreThanItsSurplus) {
  const LoadTable load = load_of(3, {{40, 50, 0}});
  const StepPlan plan = plan_of(*make_moonep(), {.load = load});
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(30, 0));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(20, 10));
  EXPECT_THAT(tokens(plan, 0, 2), ElementsAre(0, 30));
}

TEST(Moonep, StopsPairingWithinTheBound) {
  const LoadTable load = load_of(3, {{40, 50, 0}});
  const StepPlan plan = plan_of(*make_moonep({.bound = 0.5}), {.load = load});  // up to 45 tokens per rank
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(40, 0));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(20, 0));
  EXPECT_THAT(tokens(plan, 0, 2), ElementsAre(0, 30));
}

TEST(Moonep, ServesPartsWithoutASlotAtHome) {
  // Rank 1 lacks 25: 15 of e0 and 10 of e1. A single slot takes the larger part.
  const LoadTable load = load_of(2, {{15, 12, 11, 12, 0, 0, 0, 0}});
  EXPECT_THAT(tokens(plan_of(*make_moonep(), {.load = load}), 0, 1), ElementsAre(0, 0, 0, 0, 15));
  EXPECT_THAT(tokens(plan_of(*make_moonep(), {.load = load, .guest_slots = 2}), 0, 1), ElementsAre(0, 0, 0, 0, 15, 10));
}

TEST(Moonep, IsPerfectlyBalancedWithOneHomePerReceiver) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const LoadTable load = test::random_load({.ranks = 6, .experts = 24}, seed, 400);
    const StepPlan plan = plan_of(*make_moonep(), {.load = load, .guest_slots = 4});
    EXPECT_EQ(plan.max_load, plan.lower_bound);
    for (int t = 0; t < plan.num_events(); ++t) {
      for (int l = 0; l < plan.num_layers(); ++l) {
        for (int r = 0; r < plan.num_ranks(); ++r) {
          std::set<RankId> homes;
          for (const ExpertId e : plan.slot_expert.row(t, l, r).subspan(4)) {
            if (e != kNoExpert) homes.insert(plan.home(l, e));
          }
          EXPECT_LE(homes.size(), 1U);
        }
      }
    }
  }
}

TEST(Moonep, CopiesLessWithABoundAndStaysWithinIt) {
  const LoadTable load = test::random_load({.micro_steps = 6, .ranks = 8, .experts = 32}, 3, 400);
  std::int64_t copies = plan_figures(plan_of(*make_moonep(), {.load = load, .guest_slots = 4}), load).copies;
  for (const double bound : {0.05, 0.2, 10.0}) {
    const StepPlan plan = plan_of(*make_moonep({.bound = bound}), {.load = load, .guest_slots = 4});
    for (std::size_t i = 0; i < plan.max_load.size(); ++i) {
      EXPECT_LE(static_cast<double>(plan.max_load.flat()[i].value),
                (1 + bound) * static_cast<double>(plan.lower_bound.flat()[i].value) + 1);
    }
    const std::int64_t fewer = plan_figures(plan, load).copies;
    EXPECT_LT(fewer, copies);
    copies = fewer;
  }
  EXPECT_EQ(copies, 0);
}

TEST(Moonep, CopiesAfterTheRouter) { EXPECT_TRUE(make_moonep()->online().copies_after_router); }

}  // namespace
}  // namespace foremoe
