#include "foremoe/policy/systems/laer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/core/error.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::experts;
using test::load_of;
using test::plan_of;
using test::result_of;
using test::tokens;
using testing::ElementsAre;
using testing::HasSubstr;

// Two nodes of 2 ranks with 2 slots; 160, 80, 48, 32 tokens, a quarter from every source. Each node has one replica of
// each expert: e0 (80 each) on ranks 0 and 2, e1 (40) and e2 (24) on ranks 1 and 3, e3 (16) in the last slots.
TEST(Laer, LaysOutAndSplitsAsWorkedByHand) {
  const LoadTable load = load_of(4, {{160, 80, 48, 32}}, 2);
  const StepPlan plan = plan_of(*make_laer(), {.load = load});
  EXPECT_EQ(plan.residency, Residency::kFree);
  for (const int first_of_node : {0, 2}) {
    EXPECT_THAT(experts(plan, 0, first_of_node), ElementsAre(0, 3));
    EXPECT_THAT(tokens(plan, 0, first_of_node), ElementsAre(80, 16));
    EXPECT_THAT(experts(plan, 0, first_of_node + 1), ElementsAre(1, 2));
    EXPECT_THAT(tokens(plan, 0, first_of_node + 1), ElementsAre(40, 24));
  }
}

bool same_layout(const StepPlan& a, int event_a, const StepPlan& b, int event_b) {
  for (int l = 0; l < a.num_layers(); ++l) {
    for (int r = 0; r < a.num_ranks(); ++r) {
      const auto row_a = a.slot_expert.row(event_a, l, r);
      const auto row_b = b.slot_expert.row(event_b, l, r);
      if (!std::ranges::is_permutation(row_a, row_b)) return false;
    }
  }
  return true;
}

TEST(Laer, PlansByPreviousMicroStepsOnly) {
  const LoadTable load = test::random_load({.micro_steps = 4, .ranks = 4, .experts = 16}, 1, 400);
  const StepPlan of_last_one = plan_of(*make_laer({.history = 1}), {.load = load});
  const StepPlan oracle = plan_of(*make_laer_oracle(), {.load = load});
  for (int m = 1; m < 4; ++m) {
    EXPECT_TRUE(same_layout(of_last_one, m, oracle, m - 1));
    EXPECT_FALSE(same_layout(of_last_one, m, oracle, m));
  }
}

TEST(Laer, StartsFromThePreviousLoadIfGiven) {
  const LoadTable load = test::random_load({.micro_steps = 3, .ranks = 4, .experts = 16}, 1, 400);
  const LoadTable former = test::random_load({.micro_steps = 2, .ranks = 4, .experts = 16}, 2, 400);
  const StepPlan plan = plan_of(*make_laer({.history = 1}), {.load = load, .previous_load = &former});
  EXPECT_TRUE(same_layout(plan, 0, plan_of(*make_laer_oracle(), {.load = former}), 1));
  EXPECT_TRUE(same_layout(plan, 1, plan_of(*make_laer_oracle(), {.load = load}), 0));

  const LoadTable other = test::random_load({.ranks = 2, .experts = 16}, 2);
  EXPECT_THROW(result_of(*make_laer(), {.load = load, .previous_load = &other}), InputError);
}

TEST(Laer, KeepsTokensOnTheirNodeIfItHoldsTheirExpert) {
  const LoadTable load = test::random_load({.micro_steps = 3, .ranks = 8, .experts = 16, .ranks_per_node = 4}, 5, 300);
  const StepPlan plan =
      plan_of(*make_laer(), {.load = load, .guest_slots = 2});  // 32 slots: every expert on both nodes
  EXPECT_EQ(plan_figures(plan, load).node_link_tokens.max, 0);
}

TEST(Laer, BalancesBetterWithTheMicroStepsOwnLoad) {
  const LoadTable load = test::bursty_load({.micro_steps = 8, .ranks = 8, .experts = 32, .ranks_per_node = 4}, 1);
  const auto rho = [&](const Policy& policy) {
    return plan_figures(plan_of(policy, {.load = load, .guest_slots = 2}), load).rho.mean;
  };
  EXPECT_LT(rho(*make_laer_oracle()), rho(*make_laer()));
}

TEST(Laer, IsSkippedWithBackwardEvents) {
  const LoadTable load = test::random_load({}, 1);
  EXPECT_THAT(std::get<Skipped>(result_of(*make_laer(), {.load = load, .in_flight = 2})).reason,
              HasSubstr("one micro-step in flight"));
}

}  // namespace
}  // namespace foremoe
