// What placement costs, and who is charged for it.

#include "foremoe/evaluate/measured_plan.h"

#include <gtest/gtest.h>

#include <ctime>

#include "foremoe/testing/evaluated_step.h"

namespace foremoe {
namespace {

using Placement = test::EvaluatedStep;

// Plans as foremoe does, and works until it hands out the first micro-step, and then again.
class Slow final : public Policy {
 public:
  std::string_view name() const override { return "slow"; }
  std::string_view summary() const override { return "sleeps"; }
  std::span<const std::string_view> uses() const override { return {}; }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return true; }
  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    PolicyResult result =
        find_policy("foremoe")->plan({.load = input.load, .home = input.home, .options = input.options}, pool);
    const StepPlan& plan = std::get<PlannedStep>(result).plan;
    work(0.03);
    input.on_micro_step(plan, MicroStepId{0});
    work(0.3);
    input.on_micro_step(plan, MicroStepId{1});
    return result;
  }

 private:
  static void work(double cpu_seconds) {
    const std::clock_t end = std::clock() + static_cast<std::clock_t>(cpu_seconds * CLOCKS_PER_SEC);
    while (std::clock() < end) {
    }
  }
};

// Plans as foremoe does, and says that it worked 2 s for the whole step and 4 s for its micro-steps.
class Once final : public Policy {
 public:
  explicit Once(OnlineWork online = {}) : online_(online) {}
  std::string_view name() const override { return "once"; }
  std::string_view summary() const override { return "plans ahead where it knows no former step"; }
  OnlineWork online() const override { return online_; }
  std::span<const std::string_view> uses() const override { return {}; }
  bool plans_ahead(const PolicyInput& input) const override { return input.previous_load == nullptr; }
  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    PolicyResult result =
        find_policy("foremoe")->plan({.load = input.load, .home = input.home, .options = input.options}, pool);
    std::get<PlannedStep>(result).times = {.base_cpu_seconds = 2, .planning_cpu_seconds = 4};
    return result;
  }

 private:
  OnlineWork online_;
};

TEST_F(Placement, IsWhatMustBePlannedBeforeTheFirstMicroStep) {
  const auto layers = static_cast<double>(cost_.model().moe_layers) / input_.load.num_layers();
  const auto placement = [&](double tail) {
    const Evaluation e = evaluate(Slow(), input_, {.rollout_tail_seconds = tail}, {.pool = pool_, .cost = &cost_});
    EXPECT_GE(e.placement_seconds, 0.03 * layers);
    EXPECT_LT(e.placement_seconds, 0.3 * layers) << "what follows the first micro-step is hidden";
    EXPECT_EQ(e.step->placed_step_seconds, e.step->step_seconds + e.step->exposed_placement_seconds);
    return std::pair(e.placement_seconds, e.step->exposed_placement_seconds);
  };
  const auto [all, exposed] = placement(0);
  EXPECT_EQ(exposed, all);
  EXPECT_EQ(placement(1e6).second, 0);
  const Evaluation foremoe = evaluate(policy_named("foremoe"), input_, {}, {.pool = pool_, .cost = &cost_});
  EXPECT_GT(foremoe.placement_seconds, 0);
  EXPECT_EQ(evaluate(policy_named("feplb"), input_, {}, {.pool = pool_, .cost = &cost_}).placement_seconds, 0)
      << "works online";
}

TEST_F(Placement, IsAllThatIsPlannedBeforeTheFirstMicroStep) {
  const auto layers = static_cast<double>(cost_.model().moe_layers) / input_.load.num_layers();
  const auto placement = [&](const Policy& policy, const EvaluateOptions& options) {
    const Evaluation e = evaluate(policy, input_, options, {.pool = pool_, .cost = &cost_});
    if (!e.step) {
      ADD_FAILURE() << e.skipped << (e.check.ok() ? "" : e.check.violations.front().message);
      return 0.0;
    }
    EXPECT_EQ(e.step->exposed_placement_seconds, e.placement_seconds);
    EXPECT_EQ(e.step->placed_step_seconds, e.step->step_seconds + e.placement_seconds);
    return e.placement_seconds / layers;
  };
  EXPECT_GE(placement(Slow(), {.planner = {.residency = Residency::kShared}}), 0.33) << "quotas say what is copied";
  const double one = 2 + 4.0 / input_.load.num_micro_steps();
  EXPECT_DOUBLE_EQ(placement(Once(), {}), one);
  EXPECT_DOUBLE_EQ(placement(Once(), {.planner = {.in_flight = 2}}), 2 * one) << "recompute has a plan of its own";
  EXPECT_DOUBLE_EQ(placement(Once(), {.choose_residency = true}), 4 * one) << "shared, static, resident and free";
}

TEST_F(Placement, IsChargedToWhoeverPlansTheStepAheadByItsOwnRoutes) {
  const auto layers = static_cast<double>(cost_.model().moe_layers) / input_.load.num_layers();
  const auto placement = [&](const Policy& policy) {
    const PlannerOptions planner{.guest_slots = 2};
    return evaluate(policy, input_, {.planner = planner}, {.pool = pool_, .cost = &cost_}).placement_seconds;
  };
  const auto expect_charged = [&](bool charged, std::initializer_list<const char*> names) {
    for (const char* name : names) EXPECT_EQ(placement(policy_named(name)) > 0, charged) << name;
  };
  EXPECT_EQ(placement(Once()), (2 + 4.0 / input_.load.num_micro_steps()) * layers);
  EXPECT_EQ(placement(Once({.planning_seconds = 1})), 2 * layers) << "a micro-step's planning is charged online";
  // Some of them do nothing once per step.
  expect_charged(true, {"relibra", "foremoe-review", "foremoe-review-mda", "eplb", "eplb-oracle", "ema"});
  expect_charged(true, {"flexmoe", "smartmoe", "lplb", "laer"});
  expect_charged(false, {"vanilla", "ultraep", "feplb", "symi", "eplb-ema"});
  input_.previous_load = input_.load;
  EXPECT_EQ(placement(Once()), 0) << "was planned before the step";
  expect_charged(true, {"relibra", "foremoe-review-mda", "eplb-oracle", "laer-oracle", "static"});
  expect_charged(false, {"eplb", "ema", "flexmoe", "smartmoe", "lplb", "laer"});
}

}  // namespace
}  // namespace foremoe
