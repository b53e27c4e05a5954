// FasterMoE's shadows, by hand from its code's constants, and what they become as a plan.

#include "foremoe/policy/systems/fastermoe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/plan/check_plan.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// fmoe/fastermoe/shadow_policy.py: alpha 2, d_model 2048, 50 Gb/s, 11.5 Tflop/s, float32, two matrices.
constexpr FasterMoeOptions kOfTheCode{.hidden = 2048,
                                      .intermediate = 2 * 2048,
                                      .matrices = 2,
                                      .bytes_per_value = 4,
                                      .bytes_per_second = 50e9 / 8,
                                      .flops_per_second = 11.5e12};

std::vector<int> shadows(const std::vector<std::int64_t>& load, int limit, const FasterMoeOptions& options = {}) {
  std::vector<int> ids;
  for (const ExpertId e : fastermoe_shadows(load, limit, options)) ids.push_back(e.value);
  return ids;
}

// comp_time = 4·2·2048² / 11.5e12 = 2.918 µs, send_feature_time = 2048·4 / 6.25e9 = 1.311 µs, so that a token of the
// largest expert costs 3·2.918 + 4·1.311 = 13.996 µs; send_model_time = 2·2·2048²·4 / 6.25e9 = 10,737 µs.
TEST(FasterMoe, ModelsTheTimeAsItsCodeDoes) {
  EXPECT_NEAR(kOfTheCode.compute_seconds() * 1e6, 2.918, 0.001);
  EXPECT_NEAR(kOfTheCode.send_seconds() * 1e6, 1.311, 0.001);
  EXPECT_NEAR(kOfTheCode.broadcast_seconds() * 1e6, 10737, 1);
  EXPECT_NEAR(fastermoe_seconds(kOfTheCode, 1000, 2) * 1e6, 13996.3 + 2 * 10737.4, 1);
}

// A shadow pays when the next expert has at least 10,737 / 13.996 = 767.2 tokens less.
TEST(FasterMoe, ShadowsWhileItsModelSaysSo) {
  EXPECT_THAT(shadows({2000, 4000, 100, 3000}, 8, kOfTheCode), ElementsAre(1, 3, 0));
  EXPECT_THAT(shadows({2300, 4000, 100, 3000}, 8, kOfTheCode), ElementsAre(1));  // 3000 to 2300: 700 too few
  EXPECT_THAT(shadows({1768, 1000}, 8, kOfTheCode), ElementsAre(0));
  EXPECT_THAT(shadows({1767, 1000}, 8, kOfTheCode), IsEmpty());
}

TEST(FasterMoe, ShadowsNoMoreThanThereAreSlotsAndNeverTheLastExpert) {
  EXPECT_THAT(shadows({2000, 4000, 100, 3000}, 2, kOfTheCode), ElementsAre(1, 3));
  EXPECT_THAT(shadows({2000, 4000, 100, 3000}, 0, kOfTheCode), IsEmpty());
  EXPECT_THAT(shadows({100'000}, 8, kOfTheCode), IsEmpty());
}

TEST(FasterMoe, TakesTheLowerOfTwoExpertsOfTheSameLoad) {
  EXPECT_THAT(shadows({0, 9000, 9000, 0}, 2, {.bytes_per_second = 1e15}), IsEmpty());  // the first gains nothing
  EXPECT_THAT(shadows({9000, 8999, 0, 0}, 1, {.bytes_per_second = 1e15}), ElementsAre(0));
}

StepPlan planned(const LoadTable& load, const PlannerOptions& planner_options, const FasterMoeOptions& options = {}) {
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  ThreadPool pool(1);
  const PolicyResult result =
      make_fastermoe(options)->plan({.load = load, .home = home, .options = planner_options}, pool);
  StepPlan plan = std::get<PlannedStep>(result).plan;
  const PlanFigures figures = plan_figures(plan, load);
  const CheckReport report = check_plan(plan, load, {.reported = &figures});
  EXPECT_TRUE(report.ok()) << report.violations.front().message;
  return plan;
}

// Every shadow of the model is served by each rank's own tokens, and by home for home's alone; nothing else is a guest.
void expect_own_tokens(const StepPlan& plan, const LoadTable& load, const FasterMoeOptions& options) {
  std::vector<std::int64_t> of_expert(load.num_experts());
  for (int t = 0; t < plan.num_events(); ++t) {
    const MicroStepId m = plan.event_micro_step[t];
    for (int l = 0; l < plan.num_layers(); ++l) {
      load.expert_loads(m, LayerId{l}, of_expert);
      const auto shadowed = fastermoe_shadows(of_expert, plan.guest_slots, options);
      const Array<SlotId, 2> slot = test::slots_of(plan, t, l);
      for (int e = 0; e < plan.num_experts(); ++e) {
        const bool is_shadow = std::ranges::find(shadowed, ExpertId{e}) != shadowed.end();
        for (int r = 0; r < plan.num_ranks(); ++r) {
          const Tokens own = load.load(m, l, r, e);
          if (is_shadow && slot(r, e).value >= 0) {
            EXPECT_EQ(plan.slot_tokens(t, l, r, slot(r, e)), own);
          }
          if (plan.home(l, e) != RankId{r}) {
            EXPECT_EQ(slot(r, e).value >= 0, is_shadow && own > Tokens{0});
          }
        }
      }
    }
  }
}

constexpr FasterMoeOptions kSmallExperts{.hidden = 64, .intermediate = 8, .bytes_per_second = 1e12};

TEST(FasterMoe, LetsEveryRankServeItsOwnTokensOfShadows) {
  const LoadTable load = test::random_load({.micro_steps = 4, .layers = 2, .ranks = 4, .experts = 12}, 1);
  for (const int guest_slots : {0, 1, 3}) {
    const StepPlan plan = planned(load, {.guest_slots = guest_slots}, kSmallExperts);
    EXPECT_EQ(plan.residency, Residency::kShared);
    expect_own_tokens(plan, load, kSmallExperts);
  }
  EXPECT_GT(plan_figures(planned(load, {.guest_slots = 3}, kSmallExperts), load).guests_per_layer, 0);
}

TEST(FasterMoe, PlansWithSeveralMicroStepsInFlight) {
  const LoadTable load = test::random_load({.micro_steps = 4}, 1);
  expect_own_tokens(planned(load, {.guest_slots = 2, .in_flight = 3}, kSmallExperts), load, kSmallExperts);
}

TEST(FasterMoe, StopsWhereItsModelSaysSoOnATable) {
  const std::string path = "data/load-q30-ep8.safetensors";
  const LoadTable load = take_first(read_load(path), 6, 2);
  const FasterMoeOptions options;
  std::vector<std::int64_t> of_expert(load.num_experts());
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    load.expert_loads(MicroStepId{m}, LayerId{0}, of_expert);
    const auto num_shadows = static_cast<int>(fastermoe_shadows(of_expert, load.num_experts(), options).size());
    std::ranges::sort(of_expert, std::greater{});
    const auto seconds = [&](int k) { return fastermoe_seconds(options, of_expert[k], k); };
    for (int k = 0; k < num_shadows; ++k) EXPECT_LT(seconds(k + 1), seconds(k));
    EXPECT_GE(seconds(num_shadows + 1), seconds(num_shadows));
  }
  expect_own_tokens(planned(load, {.guest_slots = 2}), load, options);
}

TEST(FasterMoe, CopiesAfterTheRouter) { EXPECT_TRUE(make_fastermoe()->online().copies_after_router); }

}  // namespace
}  // namespace foremoe
