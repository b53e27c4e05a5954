#include "foremoe/policy/systems/ema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/policy_runs.h"

namespace foremoe {
namespace {

using test::experts;
using test::load_of;
using test::plan_of;
using testing::ElementsAre;

std::vector<int> relocated(const std::vector<std::int64_t>& load, const std::vector<RankId>& home, int num_ranks) {
  std::vector<int> ranks;
  for (const RankId r : relocate_greedily(load, home, num_ranks)) ranks.push_back(r.value);
  return ranks;
}

std::vector<RankId> in_blocks(int num_experts, int num_ranks) {
  std::vector<RankId> home;
  for (int e = 0; e < num_experts; ++e) home.emplace_back(e / (num_experts / num_ranks));
  return home;
}

// Loads 17 | 3. Exchanging 9 with 2 or 8 with 1 gives 10 | 10; the first has the lower ids. 9 with 1 gives 9 | 11.
TEST(GreedyRelocation, ExchangesThePairThatMinimisesTheLargerLoad) {
  EXPECT_THAT(relocated({9, 8, 2, 1}, in_blocks(4, 2), 2), ElementsAre(1, 0, 0, 1));
}

// Loads 20 | 12 | 4. Exchanging 10 with 2 gives 12 | 12 | 12. A plain move would leave a rank one expert short.
TEST(GreedyRelocation, ExchangesWithAnyRank) {
  EXPECT_THAT(relocated({10, 10, 6, 6, 2, 2}, in_blocks(6, 3), 3), ElementsAre(2, 0, 1, 1, 0, 2));
}

TEST(GreedyRelocation, KeepsHomesThatNoExchangeImproves) {
  EXPECT_THAT(relocated({9, 0, 1, 1}, in_blocks(4, 2), 2), ElementsAre(0, 0, 1, 1));  // 9 | 2; 9 with 1: 1 | 10
  EXPECT_THAT(relocated({0, 0, 0, 0}, in_blocks(4, 2), 2), ElementsAre(0, 0, 1, 1));
}

// In the result, no exchange of an expert of the busiest rank helps. Each rank's number of experts is unchanged.
TEST(GreedyRelocation, EndsWhenNoExchangeHelps) {
  Random random(7);
  for (int run = 0; run < 200; ++run) {
    const int num_ranks = 2 + static_cast<int>(random.below(7));
    const int num_experts = num_ranks * (1 + static_cast<int>(random.below(6)));
    std::vector<std::int64_t> load;
    for (int e = 0; e < num_experts; ++e) load.push_back(static_cast<std::int64_t>(random.below(1000)));
    const std::vector<int> at = relocated(load, in_blocks(num_experts, num_ranks), num_ranks);
    const auto loads = [&](const std::vector<int>& ranks) {
      std::vector<std::int64_t> sums(num_ranks);
      for (int e = 0; e < num_experts; ++e) sums[ranks[e]] += load[e];
      return sums;
    };
    for (int r = 0; r < num_ranks; ++r) ASSERT_EQ(std::ranges::count(at, r), num_experts / num_ranks);
    const std::vector<std::int64_t> end = loads(at);
    const int busiest = static_cast<int>(std::ranges::max_element(end) - end.begin());
    for (int a = 0; a < num_experts; ++a) {
      for (int b = 0; b < num_experts; ++b) {
        if (at[a] != busiest || at[b] == busiest) continue;
        std::vector<int> other = at;
        std::swap(other[a], other[b]);
        const std::vector<std::int64_t> then = loads(other);
        ASSERT_GE(std::max(then[busiest], then[at[b]]), end[busiest]) << "run " << run;
      }
    }
  }
}

TEST(Ema, RelocatesHomesOncePerStepByTheFormerStepsMean) {
  const LoadTable former = load_of(2, {{9, 8, 2, 1}, {9, 8, 2, 1}});
  const LoadTable load = load_of(2, {{9, 1, 9, 1}, {1, 9, 1, 9}});
  const StepPlan plan = plan_of(*make_ema(), {.load = load, .guest_slots = 2, .previous_load = &former});
  EXPECT_EQ(plan.residency, Residency::kStatic);
  EXPECT_EQ(plan.guest_slots, 0);
  EXPECT_TRUE(plan.can_train());
  for (const int t : {0, 1}) {
    EXPECT_THAT(experts(plan, t, 0), ElementsAre(1, 2)) << t;
    EXPECT_THAT(experts(plan, t, 1), ElementsAre(0, 3)) << t;
  }
  EXPECT_EQ(plan.max_load(0, 0), Tokens{10});
}

TEST(Ema, UsesThisStepsMeanWithoutAPreviousStep) {
  const LoadTable load = load_of(2, {{9, 8, 2, 1}, {9, 8, 2, 1}});
  const StepPlan plan = plan_of(*make_ema(), {.load = load, .guest_slots = 0, .in_flight = 2});
  EXPECT_EQ(plan.max_load(0, 0), Tokens{10});
}

}  // namespace
}  // namespace foremoe
