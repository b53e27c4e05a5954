// Tests the cost of placement and which policies are charged for it.

#include "foremoe/evaluate/measured_plan.h"

#include <gtest/gtest.h>

#include <numeric>

#include "foremoe/testing/evaluated_step.h"

namespace foremoe {
namespace {

using Placement = test::EvaluatedStep;

// Plans like foremoe. Reports 2 s per layer once per step and 1 s per layer for the first micro-step. The second run
// reports half of these times, other runs ten times as much.
class Slow final : public Policy {
 public:
  explicit Slow(OnlineWork online = {}) : online_(online) {}
  std::string_view name() const override { return "slow"; }
  std::string_view summary() const override { return "plans ahead where it knows no former step"; }
  OnlineWork online() const override { return online_; }
  bool plans_ahead(const PolicyInput& input) const override { return input.previous_load == nullptr; }
  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    PolicyResult result =
        find_policy("foremoe")->plan({.load = input.load, .home = input.home, .options = input.options}, pool);
    const double factor = runs_++ % 3 == 1 ? 1 : 10;
    const auto layers = static_cast<std::size_t>(input.load.num_layers());
    PlanTimes& times = std::get<PlannedStep>(result).times;
    times.once_of_layer.assign(layers, 2 * factor);
    times.first_of_layer.assign(layers, 1 * factor);
    times.later_of_layer.assign(layers, 4 * factor);
    return result;
  }

 private:
  OnlineWork online_;
  mutable int runs_ = 0;
};

TEST(PlanningSeconds, AreThoseOfTheSlowestPlannerPlusTheGather) {
  const std::vector<double> of_layer{1, 2, 3, 4, 5, 6};
  const auto seconds = [&](const Planners& planners) { return planning_seconds(of_layer, 6, planners); };
  EXPECT_DOUBLE_EQ(seconds({}), 21);
  EXPECT_DOUBLE_EQ(seconds({.count = 2, .gather_seconds = 0.5}), 4 + 5 + 6 + 0.5);
  EXPECT_DOUBLE_EQ(seconds({.count = 6, .gather_seconds = 0.5}), 6.5) << "a layer is not divided";
  EXPECT_DOUBLE_EQ(seconds({.count = 64, .gather_seconds = 0.5}), 6.5);
  EXPECT_DOUBLE_EQ(seconds({.count = 64, .gather_seconds = 100}), 21) << "each rank plans all layers alone";
  EXPECT_DOUBLE_EQ(seconds({.threads = 3}), 3 + 6) << "1 + 4, 2 + 5 and 3 + 6";
  EXPECT_DOUBLE_EQ(planning_seconds({}, 6, {.count = 2, .gather_seconds = 1}), 0);
}

TEST(PlanningSeconds, CountLayersOfTheModel) {
  const std::vector<double> of_layer{1, 3};
  EXPECT_DOUBLE_EQ(planning_seconds(of_layer, 8, {}), 4 * 1 + 4 * 3);
  EXPECT_DOUBLE_EQ(planning_seconds(of_layer, 8, {.count = 4}), 2 * 3);
  EXPECT_DOUBLE_EQ(planning_seconds(of_layer, 8, {.count = 3}), 3 * 3) << "layers 5 to 7";
}

TEST_F(Placement, IsTheLeastOfThreeRunsUntilTheFirstMicroStep) {
  const int layers = cost_.model().moe_layers;
  const auto placement = [&](EvaluateOptions options) {
    options.planners = 1;
    const Evaluation e = evaluate(Slow(), input_, options, {.pool = pool_, .cost = &cost_});
    if (!e.step) {
      ADD_FAILURE() << e.skipped << (e.check.ok() ? "" : e.check.violations.front().message);
      return 0.0;
    }
    EXPECT_EQ(e.step->exposed_placement_seconds, std::max(0.0, e.placement_seconds - options.rollout_tail_seconds));
    EXPECT_EQ(e.step->placed_step_seconds, e.step->step_seconds + e.step->exposed_placement_seconds);
    return e.placement_seconds / layers;
  };
  EXPECT_DOUBLE_EQ(placement({}), 3);
  EXPECT_DOUBLE_EQ(placement({.rollout_tail_seconds = 4}), 3);
  EXPECT_DOUBLE_EQ(placement({.planner = {.in_flight = 2}}), 2 * 3) << "recompute has a plan of its own";
}

TEST_F(Placement, IsSharedByAllRanksByDefault) {
  const int layers = cost_.model().moe_layers;
  const auto placement = [&](const EvaluateOptions& options) {
    return evaluate(Slow(), input_, options, {.pool = pool_, .cost = &cost_}).placement_seconds;
  };
  const double of_a_rank = 3 * (layers / 8);
  ASSERT_EQ(layers % 8, 0);
  EXPECT_DOUBLE_EQ(placement({.plan_gather_seconds = 0.25}), of_a_rank + 0.25);
  EXPECT_DOUBLE_EQ(placement({.planners = layers, .plan_gather_seconds = 0.25}), 3.25);
  EXPECT_DOUBLE_EQ(placement({.planners = 8, .planning_threads = 3, .plan_gather_seconds = 0}), of_a_rank / 3);
}

TEST_F(Placement, WaitsForTheFirstMicroStepUnlessArenasAreFilledForThePhase) {
  const auto placement = [&](Residency residency, PathChoice path) {
    const EvaluateOptions options{.planner = {.guest_slots = 2, .residency = residency}, .path = path, .planners = 1};
    const Evaluation e = evaluate(Slow(), input_, options, {.pool = pool_, .cost = &cost_});
    EXPECT_EQ(e.step->exposed_placement_seconds, e.placement_seconds);
    return e.placement_seconds / cost_.model().moe_layers;
  };
  EXPECT_DOUBLE_EQ(placement(Residency::kShared, PathChoice::kPeer), 2 + 1);
  EXPECT_DOUBLE_EQ(placement(Residency::kShared, PathChoice::kHost), 2 + 1 + 4);
  EXPECT_DOUBLE_EQ(placement(Residency::kResident, PathChoice::kHost), 2 + 1);
}

TEST_F(Placement, OfAMicroStepIsAnEqualPartIfAllArePlannedAlike) {
  const auto first = [&](const char* name, Residency residency) {
    const PolicyResult result = policy_named(name).plan(
        {.load = input_.load, .home = input_.homes, .options = {.guest_slots = 2, .residency = residency}}, pool_);
    const PlanTimes& times = std::get<PlannedStep>(result).times;
    const double waited = std::accumulate(times.first_of_layer.begin(), times.first_of_layer.end(), 0.0);
    EXPECT_EQ(times.once_of_layer.size(), static_cast<std::size_t>(input_.load.num_layers()));
    return waited / times.planning_cpu_seconds;
  };
  EXPECT_LT(first("foremoe", Residency::kShared), 0.9);
  EXPECT_NEAR(first("relibra", Residency::kShared), 1.0 / input_.load.num_micro_steps(), 1e-9);
  EXPECT_NEAR(first("eplb-oracle", Residency::kStatic), 1.0 / input_.load.num_micro_steps(), 1e-9);
}

TEST_F(Placement, IsChargedToPoliciesThatPlanAheadFromTheStepsOwnRoutes) {
  const int layers = cost_.model().moe_layers;
  const auto placement = [&](const Policy& policy) {
    const EvaluateOptions options{.planner = {.guest_slots = 2}, .choose = ChooseAmong::kGiven, .planners = 1};
    return evaluate(policy, input_, options, {.pool = pool_, .cost = &cost_}).placement_seconds;
  };
  const auto expect_charged = [&](bool charged, std::initializer_list<const char*> names) {
    for (const char* name : names) EXPECT_EQ(placement(policy_named(name)) > 0, charged) << name;
  };
  EXPECT_EQ(placement(Slow()), 3 * layers);
  EXPECT_EQ(placement(Slow({.planning_seconds = 1})), 2 * layers) << "a micro-step's planning is charged online";
  // Some policies do no work once per step.
  expect_charged(true, {"foremoe", "relibra", "foremoe-review", "foremoe-review-mda", "eplb", "eplb-oracle", "ema"});
  expect_charged(true, {"flexmoe", "smartmoe", "lplb", "laer"});
  expect_charged(false, {"vanilla", "ultraep", "feplb", "symi", "eplb-ema"});
  input_.previous_load = input_.load;
  EXPECT_EQ(placement(Slow()), 0) << "was planned before the step";
  expect_charged(true, {"relibra", "foremoe-review-mda", "eplb-oracle", "laer-oracle", "static"});
  expect_charged(false, {"eplb", "ema", "flexmoe", "smartmoe", "lplb", "laer"});
}

}  // namespace
}  // namespace foremoe
