#include "foremoe/evaluate/growing_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/same_plan.h"

namespace foremoe {
namespace {

using std::chrono_literals::operator""ms;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr PlannerOptions kShared{.guest_slots = 1, .residency = Residency::kShared};

Workload workload(LoadTable load) {
  Array<RankId, 2> homes = contiguous_homes(load);
  return {.load = std::move(load), .homes = std::move(homes)};
}

// Returns micro-steps [first, last).
LoadTable cut(const LoadTable& load, int first, int last) {
  const std::size_t cells = load.load.size() / load.load.extent(0);
  LoadTable part = load;
  part.load = Array<Tokens, 4>(
      {static_cast<std::size_t>(last - first), load.load.extent(1), load.load.extent(2), load.load.extent(3)});
  std::ranges::copy(load.load.flat().subspan(first * cells, part.load.size()), part.load.flat().begin());
  return part;
}

StepPlan planned(const LoadTable& load, const PlannerOptions& options = kShared) {
  const Workload whole = workload(load);
  ThreadPool pool(1);
  return std::get<PlannedStep>(plan_with(policy_named("foremoe"), whole, whole.for_policy(options), pool)).plan;
}

// Appends the block. Returns why it was refused.
std::string refusal(GrowingPlan& growing, const StepPlan& block) {
  try {
    growing.append(block);
  } catch (const InputError& error) {
    return error.where().field + " " + error.problem();
  }
  return "appended";
}

class GrowingPlanTest : public testing::Test {
 protected:
  StepPlan block(int first, int last, const PlannerOptions& options = kShared) const {
    return planned(cut(whole_.load, first, last), options);
  }
  const Workload whole_ = workload(test::bursty_load({.micro_steps = 4, .layers = 2}, 1));
  GrowingPlan growing_{whole_};
};

TEST_F(GrowingPlanTest, EqualsThePlanOfTheWholeLoadForAnyBlocks) {
  const StepPlan expected = planned(whole_.load);
  for (const std::vector<int>& ends : {std::vector{4}, {1, 4}, {1, 2, 4}, {3, 4}, {1, 2, 3, 4}}) {
    GrowingPlan growing(whole_);
    for (int first = 0; const int end : ends) {
      growing.append(block(first, end));
      EXPECT_EQ(growing.num_planned(), end);
      first = end;
    }
    test::expect_same_plan(growing.plan(), expected);
  }
}

TEST_F(GrowingPlanTest, TakesPlansWhoseGuestsDependOnAllMicroStepsWhole) {
  for (const Residency residency : {Residency::kStatic, Residency::kResident}) {
    const PlannerOptions options{.guest_slots = 1, .residency = residency};
    GrowingPlan growing(whole_);
    EXPECT_THAT(refusal(growing, block(0, 1, options)), HasSubstr("whose guests depend on the others"));
    growing.append(block(0, 4, options));
    test::expect_same_plan(growing.plan(), planned(whole_.load, options));
  }
}

TEST_F(GrowingPlanTest, RefusesBlocksThatAreNotNextAndStaysAsItWas) {
  EXPECT_THAT(refusal(growing_, block(2, 3)), HasSubstr("is not a plan of the load from micro-step 0 on"));
  growing_.append(block(0, 1));
  StepPlan without_bounds = block(1, 2);
  without_bounds.max_load = {};
  const StepPlan of_other_load = planned(cut(test::bursty_load({.micro_steps = 4, .layers = 2}, 2), 1, 2));
  const StepPlan of_more_layers = planned(cut(test::bursty_load({.micro_steps = 4, .layers = 3}, 1), 1, 2));
  EXPECT_THAT(refusal(growing_, block(0, 1)), HasSubstr("is not a plan of the load from micro-step 1 on"));
  EXPECT_THAT(refusal(growing_, block(0, 4)), HasSubstr("ends after micro-step 3"));
  EXPECT_THAT(refusal(growing_, of_other_load), HasSubstr("is not a plan of the load"));
  EXPECT_THAT(refusal(growing_, of_more_layers), HasSubstr("is not a plan of the load"));
  EXPECT_THAT(refusal(growing_, without_bounds), HasSubstr("block does not continue"));
  EXPECT_THAT(refusal(growing_, block(1, 2, {.guest_slots = 3, .residency = Residency::kShared})),
              HasSubstr("block does not continue"));
  growing_.append(block(1, 4));
  test::expect_same_plan(growing_.plan(), planned(whole_.load));
}

TEST_F(GrowingPlanTest, ReadersWaitForTheirMicroStep) {
  EXPECT_FALSE(growing_.wait_for(MicroStepId{0}, 1ms));
  growing_.append(block(0, 1));
  EXPECT_TRUE(growing_.wait_for(MicroStepId{0}, 0ms));
  EXPECT_FALSE(growing_.wait_for(MicroStepId{1}, 1ms));
  const std::jthread appends([this] { growing_.append(block(1, 4)); });
  while (!growing_.wait_for(MicroStepId{3}, 100ms)) continue;
  EXPECT_EQ(growing_.num_planned(), 4);
}

TEST_F(GrowingPlanTest, AFailureEndsWaitsForMissingMicroStepsOnly) {
  growing_.append(block(0, 1));
  const std::jthread fails([this] { growing_.fail("rank 2 ended"); });
  EXPECT_THAT(
      [this] {
        while (!growing_.wait_for(MicroStepId{1}, 100ms)) continue;
      },
      ThrowsMessage<std::runtime_error>(HasSubstr("rank 2 ended")));
  EXPECT_TRUE(growing_.wait_for(MicroStepId{0}, 0ms));
}

}  // namespace
}  // namespace foremoe
