#include "foremoe/rollout/load_statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace foremoe {
namespace {

TEST(MeanTokensPerRank, UsesRecordedTokensOrTheTopKOfEachLayer) {
  LoadTable table{.load = Array<Tokens, 4>({1, 2, 2, 4}), .top_k = 3, .top_k_of_layer = {3, 1}};
  for (int r = 0; r < 2; ++r) {
    for (int e = 0; e < 3; ++e) table.load(0, 0, r, e) = Tokens{10};
    table.load(0, 1, r, 3) = Tokens{10};
  }
  EXPECT_EQ(mean_tokens_per_rank(table), Tokens{10});
  table.tokens = Array<Tokens, 2>({1, 2}, Tokens{12});
  for (const std::int64_t missing : {8, 7, 0}) {  // 8: no row is short
    table.missing_rows = missing;
    EXPECT_EQ(mean_tokens_per_rank(table), Tokens{12}) << missing;
  }
}

TEST(LoadViolation, IsTheDistanceFromTheMean) {
  const LoadViolation v = load_violation(std::vector<std::int64_t>{0, 10, 20, 10});
  EXPECT_DOUBLE_EQ(v.max_vio, 1);
  EXPECT_DOUBLE_EQ(v.min_vio, -1);
  EXPECT_DOUBLE_EQ(v.avg_vio, 0.5);
}

TEST(LoadViolation, IsZeroForEqualLoadsAndWithoutLoad) {
  for (const std::int64_t load : {0, 5}) {
    const LoadViolation v = load_violation(std::vector<std::int64_t>(6, load));
    EXPECT_EQ(v.max_vio, 0);
    EXPECT_EQ(v.min_vio, 0);
    EXPECT_EQ(v.avg_vio, 0);
  }
}

TEST(ImbalanceRatio, IsMaxOverMeanAndOneWithoutLoad) {
  EXPECT_DOUBLE_EQ(imbalance_ratio(std::vector<std::int64_t>{1, 2, 3}), 1.5);
  EXPECT_DOUBLE_EQ(imbalance_ratio(std::vector<std::int64_t>{0, 0}), 1);
}

// Two experts on two ranks are chosen in alternating micro-steps, so the step's total hides the imbalance.
LoadTable taking_turns() {
  LoadTable table{.load = Array<Tokens, 4>({4, 1, 2, 2}), .name = "turns"};
  for (std::size_t m = 0; m < 4; ++m) {
    for (std::size_t r = 0; r < 2; ++r) table.load(m, 0, r, m % 2) = Tokens{50};
  }
  return table;
}

TEST(NumAssignments, IsTheSumOfAllTokens) { EXPECT_EQ(num_assignments(taking_turns()), 4 * 2 * 50); }

Array<RankId, 2> one_expert_per_rank() {
  Array<RankId, 2> home({1, 2});
  home(0, 1) = RankId{1};
  return home;
}

TEST(LayerStatistics, ShowImbalanceThatTheStepHides) {
  const LayerStatistics s = layer_statistics(taking_turns(), one_expert_per_rank().view()).at(0);
  EXPECT_DOUBLE_EQ(s.step.max_vio, 0);
  EXPECT_DOUBLE_EQ(s.step_ratio, 1);
  EXPECT_DOUBLE_EQ(s.mean_micro_step.max_vio, 1);
  EXPECT_DOUBLE_EQ(s.worst_micro_step.min_vio, -1);
  EXPECT_DOUBLE_EQ(s.mean_ratio, 2);
  EXPECT_DOUBLE_EQ(s.max_ratio, 2);
  EXPECT_DOUBLE_EQ(s.fluctuation, 1);
}

TEST(LayerStatistics, DoNotCountMicroStepsWithoutLoad) {
  LoadTable table = taking_turns();
  std::ranges::fill(table.load[3].flat(), Tokens{0});
  const LayerStatistics s = layer_statistics(table, one_expert_per_rank().view()).at(0);
  EXPECT_DOUBLE_EQ(s.mean_ratio, 2);
  EXPECT_DOUBLE_EQ(s.step_ratio, 4.0 / 3);
}

TEST(LayerStatistics, FluctuationDoesNotDependOnSizes) {
  LoadTable table{.load = Array<Tokens, 4>({2, 1, 1, 2}), .name = "sizes"};
  table.load(0, 0, 0, 0) = Tokens{1};
  table.load(0, 0, 0, 1) = Tokens{3};
  table.load(1, 0, 0, 0) = Tokens{100};
  table.load(1, 0, 0, 1) = Tokens{300};
  const Array<RankId, 2> home({1, 2});
  const LayerStatistics s = layer_statistics(table, home.view()).at(0);
  EXPECT_DOUBLE_EQ(s.fluctuation, 0);
  EXPECT_DOUBLE_EQ(s.step.max_vio, 0.5);
}

TEST(LayerStatistics, AreDefinedWithoutLoad) {
  const LoadTable table{.load = Array<Tokens, 4>({2, 1, 2, 2}), .name = "none"};
  const LayerStatistics s = layer_statistics(table, one_expert_per_rank().view()).at(0);
  EXPECT_EQ(s.step_ratio, 1);
  EXPECT_EQ(s.max_ratio, 1);
  EXPECT_EQ(s.fluctuation, 0);
}

// Layer 0: five micro-steps of experts 0 to 3 on two ranks; the third has no load. Layer 1 has no load at all.
TEST(ExpertHeat, IsLoadOverMeanOfTheStepAndOfThreeInFourMicroSteps) {
  const std::int64_t loads[5][4] = {{8, 0, 2, 2}, {0, 4, 2, 2}, {0, 0, 0, 0}, {6, 0, 1, 1}, {9, 1, 1, 1}};
  LoadTable table{.load = Array<Tokens, 4>({5, 2, 2, 4}), .name = "hot"};
  for (std::size_t m = 0; m < 5; ++m) {
    for (std::size_t e = 0; e < 4; ++e) table.load(m, 0, e % 2, e) = Tokens{loads[m][e]};
  }
  const ExpertHeat heat = expert_heat(table);
  using testing::ElementsAre;
  // Sums 23, 5, 6 and 6 of mean 10. Means of the micro-steps with load: 3, 2, 2 and 3.
  EXPECT_THAT(heat.step.row(0), ElementsAre(2.3, 0.5, 0.6, 0.6));
  // In order: 0, 8/3, 3, 3; 0, 0, 1/3, 2; 1/3, 1/2, 2/3, 1; likewise. The second is reached in three of four.
  EXPECT_THAT(heat.steady.row(0), ElementsAre(8 / 3.0, 0, 0.5, 0.5));
  EXPECT_THAT(heat.step.row(1), testing::Each(0));
  EXPECT_THAT(heat.steady.row(1), testing::Each(0));
}

TEST(ImbalanceRatios, CoverEveryMicroStepAndLayer) {
  const Array<double, 2> ratios = imbalance_ratios(taking_turns(), one_expert_per_rank().view());
  EXPECT_EQ(ratios.shape(), (std::array<std::size_t, 2>{4, 1}));
  EXPECT_THAT(ratios.flat(), testing::Each(2.0));
}

}  // namespace
}  // namespace foremoe
