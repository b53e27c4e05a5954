#include "foremoe/evaluate/pair_figures.h"

#include <gtest/gtest.h>

#include <cmath>
#include <variant>

#include "foremoe/planner/planner.h"
#include "foremoe/policy/policy.h"

namespace foremoe {
namespace {

// Four micro-steps, one layer, two ranks with two experts each. All tokens are on rank 0.
LoadTable four_micro_steps(std::initializer_list<std::array<std::int64_t, 4>> loads) {
  LoadTable table{.load = Array<Tokens, 4>({loads.size(), 1, 2, 4}), .top_k = 1, .ranks_per_node = 2, .name = {}};
  int m = 0;
  for (const auto& of_expert : loads) {
    for (std::size_t e = 0; e < 4; ++e) table.load(m, 0, 0, e) = Tokens{of_expert[e]};
    ++m;
  }
  return table;
}

StepPlan vanilla_plan(const LoadTable& load) {
  ThreadPool pool(1);
  const Array<RankId, 2> home = contiguous_homes(1, 4, 2);
  auto result = find_policy("vanilla")->plan({.load = load, .home = home, .options = {.guest_slots = 0}}, pool);
  return std::get<PlannedStep>(std::move(result)).plan;
}

TEST(PairFigures, CountPairsInTheBucketOfTheirRho) {
  // Rank loads 10:10, 12:8, 15:5, 20:0 → ρ 1, 1.2, 1.5, 2.
  const LoadTable load = four_micro_steps({{5, 5, 5, 5}, {6, 6, 4, 4}, {10, 5, 5, 0}, {10, 10, 0, 0}});
  const PairFigures figures = pair_figures(vanilla_plan(load), load);
  EXPECT_EQ(figures.share_of_bucket, (std::array<double, 5>{0.25, 0.25, 0, 0.25, 0.25}));
  EXPECT_DOUBLE_EQ(figures.straggler, (0 + 2 + 5 + 10) / 4.0);
  EXPECT_DOUBLE_EQ(figures.waste, (0 + 2.0 / 12 + 5.0 / 15 + 10.0 / 20) / 4);
  // Rank 0 sends the tokens that rank 1 serves: 10, 8, 5 and 0 tokens, regardless of how replicas are filled.
  EXPECT_DOUBLE_EQ(figures.sent_without_locality, 23 / 4.0);
  EXPECT_DOUBLE_EQ(figures.sent_with_node_locality, 23 / 4.0);
  EXPECT_DOUBLE_EQ(figures.between_nodes, 0);
  EXPECT_DOUBLE_EQ(figures.copies_after_first_event, 0);
}

TEST(LoadStability, FindsEqualStepsWithDifferentMicroSteps) {
  const LoadTable load = four_micro_steps({{8, 0, 0, 0}, {0, 4, 4, 0}, {0, 4, 4, 0}, {8, 0, 0, 0}});
  const LoadStability stability = load_stability(load, 2);
  EXPECT_DOUBLE_EQ(stability.step_change, 0);
  EXPECT_DOUBLE_EQ(stability.micro_step_change, 1);
  EXPECT_DOUBLE_EQ(stability.hottest, 2);  // 8 of 16 tokens; the mean expert has a quarter
}

TEST(LoadStability, HasNoStepChangeForOneStep) {
  const LoadTable load = four_micro_steps({{8, 0, 0, 0}, {0, 4, 4, 0}});
  EXPECT_TRUE(std::isnan(load_stability(load, 1).step_change));
}

}  // namespace
}  // namespace foremoe
