// Tests which field the input errors of plan_step name.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "foremoe/core/error.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe {
namespace {

using test::bursty_load;
using test::plan_checked;

// The field of the InputError; "" if none was thrown.
std::string refused(const LoadTable& load, const Array<RankId, 2>& home, const PlannerOptions& options,
                    const StepPlan* previous = nullptr) {
  ThreadPool pool(1);
  try {
    plan_step({.load = load, .home = home, .options = options, .previous = previous}, pool);
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(error.where().field));
    return error.where().field;
  }
  return "";
}

TEST(BadInput, IsRejectedWithTheNameOfTheField) {
  const LoadTable load = bursty_load({.ranks = 4, .experts = 8}, 9);
  const Array<RankId, 2> home = contiguous_homes(1, 8, 4);
  EXPECT_EQ(refused(load, home, {}), "");
  EXPECT_EQ(refused(load, home, {.guest_slots = -1}), "guest_slots");
  EXPECT_EQ(refused(load, home, {.in_flight = 0}), "in_flight");
  EXPECT_EQ(refused(load, home, {.in_flight = -3}), "in_flight");
  EXPECT_EQ(refused(load, home, {.rehome = -1}), "rehome");
  EXPECT_EQ(refused(load, home, {.max_copies_per_rank = -1}), "max_copies_per_rank");
  EXPECT_EQ(refused(load, home, {.max_copies_per_source = -1}), "max_copies_per_source");
  EXPECT_EQ(refused(load, home, {.min_tokens_per_guest = -1}), "min_tokens_per_guest");
  EXPECT_EQ(refused(load, home, {.prefer = Prefer::kTime}), "prefer") << "no price";
  EXPECT_EQ(refused(load, home, {.prefer = Prefer::kTime, .copy_price = 1}), "");
  EXPECT_EQ(refused(load, home, {.prefer = Prefer::kTime, .copy_price = -1}), "copy_price");
  EXPECT_EQ(refused(load, home, {.prefer = Prefer::kTime, .copy_price = 1, .free_copies = -1}), "free_copies");
  for (const double tolerance : {-0.001, 1.001, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(refused(load, home, {.tolerance = tolerance}), "tolerance");
  }
  EXPECT_EQ(refused(load, home, {.residency = Residency::kFree, .in_flight = 2}), "residency");
}

TEST(BadInput, IsRejectedIfHomesDoNotFitTheLoad) {
  const LoadTable load = bursty_load({.ranks = 4, .experts = 8}, 9);
  EXPECT_EQ(refused(load, contiguous_homes(2, 8, 4), {}), "homes") << "a layer too many";
  EXPECT_EQ(refused(load, contiguous_homes(1, 12, 4), {}), "homes") << "too many experts";
  Array<RankId, 2> home = contiguous_homes(1, 8, 4);
  home(0, 3) = RankId{4};
  EXPECT_EQ(refused(load, home, {}), "homes") << "a rank that there is not";
  home(0, 3) = RankId{-1};
  EXPECT_EQ(refused(load, home, {}), "homes");
  home(0, 3) = RankId{0};
  EXPECT_EQ(refused(load, home, {}), "homes") << "three homes on a rank, one on another";
}

TEST(BadInput, IsRejectedIfRanksDoNotDivideExperts) {
  EXPECT_THROW(contiguous_homes(1, 8, 3), InputError);
  EXPECT_THROW(contiguous_homes(1, 8, 0), InputError);
  const LoadTable load = test::load_of(3, {std::vector<std::int64_t>(8, 5)});
  EXPECT_EQ(refused(load, Array<RankId, 2>({1, 8}), {}), "load");
}

TEST(BadInput, IsRejectedIfThePreviousPlanHasAnotherShape) {
  const Array<RankId, 2> home = contiguous_homes(1, 8, 4);
  const LoadTable load = bursty_load({.ranks = 4, .experts = 8}, 9);
  for (const test::StepShape& other :
       {test::StepShape{.layers = 2, .ranks = 4, .experts = 8}, test::StepShape{.ranks = 2, .experts = 8},
        test::StepShape{.ranks = 4, .experts = 12}}) {
    const StepPlan previous = plan_checked(bursty_load(other, 9), {}).plan;
    EXPECT_EQ(refused(load, home, {}, &previous), "previous");
  }
}

TEST(PreviousPlan, IsUsedOnlyIfTheStepStartsWithGuests) {
  const LoadTable load = bursty_load({.ranks = 4, .experts = 8}, 9);
  const LoadTable former = bursty_load({.ranks = 4, .experts = 8}, 10);
  const StepPlan previous = plan_checked(former, {.guest_slots = 2}).plan;
  const auto differs = [&](const PlannerOptions& options) {
    return plan_checked(load, options, {.previous = &previous}).plan.slot_expert !=
           plan_checked(load, options).plan.slot_expert;
  };
  EXPECT_TRUE(differs({.guest_slots = 2}));
  EXPECT_FALSE(differs({.guest_slots = 2, .residency = Residency::kShared}));
  EXPECT_FALSE(differs({.guest_slots = 2, .residency = Residency::kFree}));
  EXPECT_FALSE(differs({.guest_slots = 2, .stages = {.base = false}}));
  EXPECT_FALSE(differs({.guest_slots = 2, .max_copies_per_source = 1}));
}

}  // namespace
}  // namespace foremoe
