#include "foremoe/plan/planned_loads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "foremoe/plan/test_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

// Two ranks with an expert and a guest each; two in flight, so both micro-steps are two events: F0 F1 B0 B1.
TEST(PlannedLoads, AreTheSumsOfARanksQuotasCountedOnceForBothPasses) {
  const LoadTable load{.load = Array<Tokens, 4>({2, 1, 2, 2}), .ranks_per_node = 2};
  StepPlan plan = test::random_plan(load, {.in_flight = 2}, 1);
  for (const int event : {0, 2}) {
    plan.slot_tokens(event, 0, 0, 0) = Tokens{3};
    plan.slot_tokens(event, 0, 0, 1) = Tokens{4};
    plan.slot_tokens(event, 0, 1, 0) = Tokens{5};
  }
  for (const int event : {1, 3}) plan.slot_tokens(event, 0, 1, 1) = Tokens{6};
  const Array<Tokens, 3> loads = planned_loads(plan);
  EXPECT_THAT(loads.row(0, 0), ElementsAre(Tokens{7}, Tokens{5}));
  EXPECT_THAT(loads.row(1, 0), ElementsAre(Tokens{0}, Tokens{6}));
}

// The plan records its largest loads, which test_plans.h sums by itself.
TEST(PlannedLoads, HaveTheLargestLoadsThatThePlanRecords) {
  for (const int in_flight : {1, 2}) {
    const LoadTable load = test::random_load({.micro_steps = 4, .layers = 3}, 5);
    const StepPlan plan = test::random_plan(load, {.in_flight = in_flight}, 5);
    const Array<Tokens, 3> loads = planned_loads(plan);
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      for (int l = 0; l < load.num_layers(); ++l) {
        EXPECT_EQ(std::ranges::max(loads.row(m, l)), plan.max_load(m, l));
      }
    }
  }
}

TEST(Imbalance, IsTheLargestLoadByTheMean) {
  const std::vector<Tokens> loads{Tokens{7}, Tokens{5}, Tokens{0}};
  EXPECT_EQ(imbalance(loads), 7.0 / 4);
  EXPECT_EQ(imbalance(std::vector<Tokens>(3, Tokens{6})), 1.0);
  EXPECT_EQ(imbalance(std::vector<Tokens>(3)), std::nullopt);
}

}  // namespace
}  // namespace foremoe
