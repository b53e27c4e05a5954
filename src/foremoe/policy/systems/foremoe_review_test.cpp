#include "foremoe/policy/systems/foremoe_review.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/policy/systems/vanilla.h"
#include "foremoe/rollout/load_file.h"
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

std::unique_ptr<Policy> whole() { return make_foremoe_review(); }
std::unique_ptr<Policy> bpo_only() { return make_foremoe_review({.adjust = false}); }
std::unique_ptr<Policy> mda_only() { return make_foremoe_review({.base = false}); }

// Two ranks with homes {0 1} {2 3}, one guest slot. BPO uses the sums 30 18 10 10. Loads 48 | 20, ideal 34, all hosts
// differ by 14. Expert 0 stays: 20 + 30 is not below 48. Expert 1 moves, 20 + 18 < 48: 30 | 38. Experts 2 and 3 stay:
// 30 + 10 is not below 38. The band is 30.6 to 37.4, so rank 1's largest expert, 1, gets a replica on rank 0.
TEST(ForeMoeReview, PlacesByMeansAndMovesByMicroStep) {
  const LoadTable load = load_of(2, {{20, 4, 2, 2}, {0, 8, 6, 6}, {10, 6, 2, 2}});
  const StepPlan plan = plan_of(*whole(), {.load = load});
  EXPECT_EQ(plan.residency, Residency::kFree);
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 1, -1));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(2, 3, 1));
  // 20 + 2 | 2 + 2 + 2, ideal 14: expert 0 may not move, as 20 > 1.5 · 8.
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(20, 2, 0));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(2, 2, 2));
  // 0 + 4 | 6 + 6 + 4, ideal 10: expert 2 moves to rank 0, as 6 ≤ 1.5 · 6: 10 | 10.
  EXPECT_THAT(experts(plan, 1, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(experts(plan, 1, 1), ElementsAre(2, 3, 1));  // its weights stay at the host
  EXPECT_THAT(tokens(plan, 1, 0), ElementsAre(0, 4, 6));
  EXPECT_THAT(tokens(plan, 1, 1), ElementsAre(0, 6, 4));
  // 10 + 3 | 2 + 2 + 3, ideal 10: rank 1 has no free slot. The previous move does not persist.
  EXPECT_THAT(experts(plan, 2, 0), ElementsAre(0, 1, -1));
  EXPECT_EQ(plan.max_load(2, 0), Tokens{13});
}

TEST(ForeMoeReview, NamesItsAblationsSeparately) {
  const LoadTable load = load_of(2, {{20, 4, 2, 2}, {0, 8, 6, 6}, {10, 6, 2, 2}});
  const StepPlan bpo = plan_of(*bpo_only(), {.load = load});
  EXPECT_EQ(bpo.policy, "foremoe-review-bpo");
  for (int t = 0; t < 3; ++t) EXPECT_THAT(experts(bpo, t, 1), ElementsAre(2, 3, 1));
  EXPECT_EQ(bpo.max_load(1, 0), Tokens{16});
  const StepPlan mda = plan_of(*mda_only(), {.load = load});
  EXPECT_EQ(mda.policy, "foremoe-review-mda");
  EXPECT_THAT(experts(mda, 0, 1), ElementsAre(2, 3, -1));  // 24 | 4: 20 > 1.5 · 10
  EXPECT_THAT(experts(mda, 2, 1), ElementsAre(2, 3, -1));  // 16 | 4: 10 > 1.5 · 6
  // 8 | 12, ideal 10: 6 > 1.5 · 2.
  EXPECT_THAT(tokens(mda, 1, 0), ElementsAre(0, 8, 0));
}

TEST(ForeMoeReview, StartsFromThePreviousStepsHosts) {
  const LoadTable former_load = load_of(2, {{1, 1, 9, 9}});
  const LoadTable load = load_of(2, {{5, 5, 5, 5}});
  const StepPlan cold = plan_of(*bpo_only(), {.load = load});
  EXPECT_THAT(experts(cold, 0, 0), ElementsAre(0, 1, -1));
  StepPlan former = plan_of(*bpo_only(), {.load = former_load});  // 2 | 18: 2 + 9 < 18, expert 2 moves to rank 0
  EXPECT_THAT(experts(former, 0, 0), ElementsAre(0, 1, 2));
  // From these hosts, 15 | 5: expert 0 moves, 10 | 10. From the homes no expert would move.
  const StepPlan warm = plan_of(*bpo_only(), {.load = load, .previous = &former});
  EXPECT_THAT(experts(warm, 0, 0), ElementsAre(2, 1, -1));
  EXPECT_THAT(experts(warm, 0, 1), ElementsAre(0, 3, -1));
  former.policy = "another";
  EXPECT_EQ(plan_of(*bpo_only(), {.load = load, .previous = &former}).slot_expert, cold.slot_expert);
}

void expect_never_worse(const LoadTable& load, int guest_slots) {
  const auto max_load = [&](const Policy& policy) {
    return plan_of(policy, {.load = load, .guest_slots = guest_slots}).max_load;
  };
  const auto pairs = {std::pair{max_load(*whole()), max_load(*bpo_only())},
                      std::pair{max_load(*mda_only()), max_load(*make_vanilla())}};
  for (const auto& [adjusted, base] : pairs) {
    for (std::size_t i = 0; i < base.size(); ++i) EXPECT_LE(adjusted.flat()[i], base.flat()[i]);
  }
}

TEST(ForeMoeReview, IsNeverWorseThanItsBasePlacement) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    for (const int guest_slots : {0, 1, 3}) {
      expect_never_worse(test::bursty_load({.micro_steps = 8, .ranks = 8, .experts = 32}, seed), guest_slots);
    }
  }
  const std::string path = "data/load-q30-ep16-bursty.safetensors";
  expect_never_worse(take_first(read_load(path), 8, 1), 2);
}

}  // namespace
}  // namespace foremoe
