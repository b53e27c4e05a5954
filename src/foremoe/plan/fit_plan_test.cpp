#include "foremoe/plan/fit_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

// One micro-step and layer, two ranks with two homes and one guest slot each. Rank 1 has a guest of expert 0.
struct Small {
  LoadTable load{.load = Array<Tokens, 4>({1, 1, 2, 4}), .top_k = 1, .ranks_per_node = 2, .name = "small"};
  StepPlan plan;

  Small() {
    load.load(0, 0, 0, 0) = Tokens{100};
    plan = empty_plan({.policy = "mine",
                       .guest_slots = 1,
                       .ranks_per_node = 2,
                       .options = test::recorded_options({.guest_slots = 1})},
                      load);
    for (int e = 0; e < 4; ++e) {
      plan.home(0, e) = RankId{e / 2};
      plan.slot_expert(0, 0, e / 2, e % 2) = ExpertId{e};
    }
    plan.slot_expert(0, 0, 1, 2) = ExpertId{0};
    plan.slot_tokens(0, 0, 0, 0) = Tokens{40};
    plan.slot_tokens(0, 0, 1, 2) = Tokens{60};
  }

  std::vector<std::int64_t> quotas(const StepPlan& of) const {
    std::vector<std::int64_t> tokens;
    for (const Tokens t : of.slot_tokens.flat()) tokens.push_back(t.value);
    return tokens;
  }
};

using Quotas = std::vector<std::int64_t>;  // rank 0: experts 0, 1, empty; rank 1: experts 2, 3, 0

TEST(FitPlan, DoesNotChangeAPlanForTheSameLoad) {
  const Small small;
  const FittedPlan fitted = fit_plan(small.plan, small.load);
  EXPECT_EQ(small.quotas(fitted.plan), (Quotas{40, 0, 0, 0, 0, 60}));
  EXPECT_EQ(fitted.mismatched, 0);
}

TEST(FitPlan, ServesUnplannedRowsAtHome) {
  Small small;
  small.load.load(0, 0, 0, 0) = Tokens{110};
  small.load.load(0, 0, 1, 3) = Tokens{7};
  const FittedPlan fitted = fit_plan(small.plan, small.load);
  EXPECT_EQ(small.quotas(fitted.plan), (Quotas{50, 0, 0, 0, 7, 60}));
  EXPECT_EQ(fitted.mismatched, 17);
  EXPECT_TRUE(check_plan(fitted.plan, small.load).ok());
}

TEST(FitPlan, ShrinksGuestQuotasInProportion) {
  Small small;
  small.load.load(0, 0, 0, 0) = Tokens{33};
  const FittedPlan fitted = fit_plan(small.plan, small.load);
  EXPECT_EQ(small.quotas(fitted.plan), (Quotas{14, 0, 0, 0, 0, 19}));  // 60 · 33 ÷ 100, rounded down
  EXPECT_EQ(fitted.mismatched, 0);
}

TEST(FitPlan, RejectsALoadOfAnotherSizeAndExpertsWithoutHomes) {
  Small small;
  EXPECT_THROW(fit_plan(small.plan, {.load = Array<Tokens, 4>({2, 1, 2, 4})}), InputError);
  EXPECT_THROW(fit_plan(small.plan, {.load = Array<Tokens, 4>({1, 1, 2, 6})}), InputError);
  small.plan.residency = Residency::kFree;
  EXPECT_THROW(fit_plan(small.plan, small.load), InputError);
}

}  // namespace
}  // namespace foremoe
