#include "foremoe/policy/systems/foremoe_review/base_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace foremoe::review {
namespace {

using testing::Each;
using testing::ElementsAre;

BasePlacement placed(const std::vector<std::int64_t>& load, std::vector<int> host, const BaseShape& shape,
                     double epsilon = 0.1) {
  return place_base(load, std::move(host), shape, epsilon);
}

// 10 + 6 | 2 + 2, ideal 10, three slots each. All hosts' loads differ from ideal by 6, so experts are visited by id.
//   0: 4 + 10 < 16, moves: 6 | 14      1: rank 1 is full
//   2: 6 + 2 < 14, moves:  8 | 12      3: 8 + 2 < 12, moves: 10 | 10
TEST(BasePlacement, RelocatesIfTheNewHostStaysBelowTheOldLoad) {
  const BasePlacement base = placed({10, 6, 2, 2}, {0, 0, 1, 1}, {.num_ranks = 2, .slots_per_rank = 3});
  EXPECT_THAT(base.host, ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(base.replica, Each(-1));
}

// 1 + 8 | 12 + 8 | 1 + 0, ideal 10, at most three per rank. Distances are 1, 10 and 9, so rank 1's experts are first.
// Each goes to the least loaded rank.
TEST(BasePlacement, RelocatesFromTheHostFarthestFromIdealToTheLeastLoadedRank) {
  const BasePlacement base =
      placed({1, 8, 12, 8, 1, 0}, {0, 0, 1, 1, 2, 2}, {.num_ranks = 3, .slots_per_rank = 3}, 10.0);
  // Expert 2: 1 + 12 < 20, to rank 2, now full: 9 | 8 | 13. 3 stays: 9 + 8 is not below 8. 4: 8 + 1 < 13, to rank 1: 9
  // | 9 | 12. 5: 9 + 0 < 12, to rank 0. 0 and 1 stay: 9 + 1 and 9 + 8 are not below 9.
  EXPECT_THAT(base.host, ElementsAre(0, 0, 2, 1, 1, 0));
}

// 12 | 3 | 3, ideal 6. No expert can be relocated. Half of expert 0 goes to the lowest of the least loaded ranks.
TEST(BasePlacement, ReplicatesTheLargestExpertOfAnOverloadedRank) {
  const BasePlacement base = placed({12, 3, 3}, {0, 1, 2}, {.num_ranks = 3, .slots_per_rank = 2});
  EXPECT_THAT(base.host, ElementsAre(0, 1, 2));
  EXPECT_THAT(base.replica, ElementsAre(1, -1, -1));
}

TEST(BasePlacement, AddsOneReplicaForAnOverloadedRankEvenIfItStaysOverloaded) {
  const BasePlacement base = placed({18, 3, 3}, {0, 1, 2}, {.num_ranks = 3, .slots_per_rank = 3});  // still 9 > 1.1 · 8
  EXPECT_THAT(base.replica, ElementsAre(1, -1, -1));
}

TEST(BasePlacement, ReplicatesOnlyFromAboveToBelowTheBand) {
  const BaseShape shape{.num_ranks = 3, .slots_per_rank = 2};
  EXPECT_THAT(placed({12, 9, 9}, {0, 1, 2}, shape, 0.1).replica, Each(-1));  // 9 is not below 0.9 · 10
  EXPECT_THAT(placed({12, 9, 9}, {0, 1, 2}, shape, 0.05).replica, ElementsAre(1, -1, -1));
  EXPECT_THAT(placed({12, 9, 9}, {0, 1, 2}, shape, 0.2).replica, Each(-1));  // 12 is not above 1.2 · 10
}

TEST(BasePlacement, ReplicatesNothingWithoutFreeSlots) {
  const BasePlacement base = placed({12, 3, 3}, {0, 1, 2}, {.num_ranks = 3, .slots_per_rank = 1});
  EXPECT_THAT(base.host, ElementsAre(0, 1, 2));
  EXPECT_THAT(base.replica, Each(-1));
}

// One layer, two ranks with homes {0 1} {2 3} and one guest slot each.
StepPlan plan_holding(const std::vector<std::vector<std::vector<int>>>& events) {
  StepPlan plan;
  plan.slot_expert = Array<ExpertId, 4>({events.size(), 1, 2, 3}, kNoExpert);
  plan.home = Array<RankId, 2>({1, 4});
  for (int e = 0; e < 4; ++e) plan.home(0, e) = RankId{e / 2};
  for (std::size_t t = 0; t < events.size(); ++t) {
    for (std::size_t r = 0; r < 2; ++r) {
      for (std::size_t s = 0; s < events[t][r].size(); ++s) plan.slot_expert(t, 0, r, s) = ExpertId{events[t][r][s]};
    }
  }
  return plan;
}

TEST(WarmStart, PrefersTheRankThatHeldAnExpertMostThenItsHome) {
  EXPECT_THAT(hosts_of(plan_holding({{{0, 1}, {2, 3}}, {{0}, {1, 2, 3}}, {{0, 2}, {1, 2, 3}}}), LayerId{0}),
              ElementsAre(0, 1, 1, 1));
  EXPECT_THAT(hosts_of(plan_holding({{{0, 1, 2}, {2, 3, 0}}}), LayerId{0}), ElementsAre(0, 0, 1, 1));
}

TEST(WarmStart, AssignsNoMoreHostsThanSlots) {
  const StepPlan plan = plan_holding({{{0, 1, 2}, {3}}, {{0, 1, 3}, {2}}, {{2, 3, 0}, {1}}, {{3, 1, 2}, {0}}});
  EXPECT_THAT(hosts_of(plan, LayerId{0}), ElementsAre(0, 0, 0, 1));  // each is on rank 0 at three of four events
}

}  // namespace
}  // namespace foremoe::review
