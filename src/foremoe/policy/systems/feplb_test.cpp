#include "foremoe/policy/systems/feplb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "foremoe/plan/check_plan.h"
#include "foremoe/policy/own_options.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

StepPlan plan_of(const FeplbOptions& options, const LoadTable& load, int guest_slots, std::size_t threads = 1) {
  ThreadPool pool(threads);
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  PlannerOptions request;
  request.guest_slots = guest_slots;
  StepPlan plan =
      std::get<PlannedStep>(make_feplb(options)->plan({.load = load, .home = home, .options = request}, pool)).plan;
  const PlanFigures figures = plan_figures(plan, load);
  const CheckReport report = check_plan(plan, load, {.reported = &figures});
  EXPECT_TRUE(report.ok()) << report.violations.front().message;
  return plan;
}

struct Move {
  int expert;
  int rank;

  friend bool operator==(const Move&, const Move&) = default;
};

void PrintTo(const Move& move, std::ostream* out) { *out << move.expert << " to " << move.rank; }

// Returns the moves in the first layer and micro-step, by rank and slot. Expects that experts move whole.
std::vector<Move> moves(const StepPlan& plan, const LoadTable& load) {
  std::vector<Move> found;
  for (int r = 0; r < plan.num_ranks(); ++r) {
    for (int s = 0; s < plan.num_slots(); ++s) {
      const ExpertId e = plan.slot_expert(0, 0, r, s);
      if (e == kNoExpert || plan.home(0, e) == RankId{r}) continue;
      std::int64_t tokens = 0;
      for (int source = 0; source < load.num_ranks(); ++source) tokens += load.load(0, 0, source, e).value;
      EXPECT_EQ(plan.slot_tokens(0, 0, r, s), Tokens{tokens});
      found.push_back({e.value, r});
    }
  }
  return found;
}

// Three homes of four experts: 100 + 50 + 40 + 30 = 220, 60 + 20 + 0 + 0 = 80, 4 · 15 = 60.
const LoadTable& example() {
  static const LoadTable load = test::load_of(3, {{100, 50, 40, 30, 60, 20, 0, 0, 15, 15, 15, 15}});
  return load;
}

// Loads are 220, 80, 60. Expert 0 (100) moves to rank 2, as 160 < 220. Loads are 120, 80, 160. Rank 2's busiest own
// expert, 8 (15), moves to rank 1, as 95 < 160; a guest cannot move again. Experts 9 and 10 follow, as 110 < 145 and
// 125 < 130. Loads are 120, 125, 115. Rank 1 is the most loaded, but expert 4 (60) would raise rank 2 to 175. The
// search ends.
TEST(Feplb, MovesTheBusiestExpertToTheLeastLoadedRankWhileItHelps) {
  const StepPlan plan = plan_of({}, example(), 4);
  EXPECT_THAT(moves(plan, example()), ElementsAre(Move{8, 1}, Move{9, 1}, Move{10, 1}, Move{0, 2}));
  EXPECT_EQ(plan.max_load(0, 0), Tokens{125});
}

TEST(Feplb, TriesSmallerExpertsOnRequest) {
  const LoadTable load = test::load_of(2, {{90, 8, 40, 0}});  // 98, 40: rank 1 would have 130 with e0, 48 with e1
  EXPECT_THAT(moves(plan_of({}, load, 2), load), ElementsAre());
  EXPECT_THAT(moves(plan_of({.try_smaller = true}, load, 2), load), ElementsAre(Move{1, 1}));
}

// After expert 0 has moved to rank 2, the most loaded rank has no expert with more than 15 tokens to move.
TEST(Feplb, MovesNoExpertWithTooFewTokens) {
  EXPECT_THAT(moves(plan_of({.min_tokens = 15}, example(), 4), example()), ElementsAre(Move{0, 2}));
  EXPECT_THAT(moves(plan_of({.min_tokens = 14}, example(), 4), example()).size(), 4);
}

TEST(Feplb, MovesOnlyDynamicExperts) {
  EXPECT_THAT(moves(plan_of({.dyn = 2}, example(), 4), example()), ElementsAre(Move{8, 1}, Move{9, 1}, Move{0, 2}));
  EXPECT_THAT(moves(plan_of({.dyn = 1}, example(), 4), example()), ElementsAre(Move{8, 1}, Move{0, 2}));
  EXPECT_THAT(moves(plan_of({.dyn = 0}, example(), 4), example()), ElementsAre());
}

// Rank 0's first two experts have 10 and 30 tokens. Both move to rank 1, the larger first.
TEST(Feplb, TreatsTheFirstExpertsAsDynamicOnRequest) {
  const LoadTable load = test::load_of(2, {{10, 30, 50, 0, 0, 0}});
  EXPECT_THAT(moves(plan_of({.dyn = 2}, load, 2), load), ElementsAre(Move{2, 1}));  // 40, 50
  EXPECT_THAT(moves(plan_of({.dyn = 2, .first_experts = true}, load, 2), load),
              ElementsAre(Move{0, 1}, Move{1, 1}));  // 60, 30, then 50, 40
}

// Expert 0 fills rank 2's buffer: 120, 80, 160. Expert 8 fills rank 1's: 120, 95, 145. Expert 9 moves to rank 0, as 135
// < 145. Then no buffer is left.
TEST(Feplb, UsesNoMoreBuffersThanARankHas) {
  for (const auto& [max_num_dyn, guest_slots] : {std::pair{1, 4}, {8, 1}}) {
    const StepPlan plan = plan_of({.max_num_dyn = max_num_dyn}, example(), guest_slots);
    EXPECT_THAT(moves(plan, example()), ElementsAre(Move{9, 0}, Move{8, 1}, Move{0, 2}));
  }
  EXPECT_THAT(moves(plan_of({}, example(), 0), example()), ElementsAre());
}

// Two ranks per node. Moving expert 0 changes loads 90, 10 to 20, 80. Experts 2 and 3 move back. Ranks 2, 3 stay idle.
TEST(Feplb, MovesNothingBetweenNodes) {
  const LoadTable load = test::load_of(4, {{70, 20, 9, 1, 0, 0, 0, 0}}, 2);
  EXPECT_THAT(moves(plan_of({}, load, 2), load), ElementsAre(Move{2, 0}, Move{3, 0}, Move{0, 1}));
}

TEST(Feplb, NeverRaisesTheLargestLoadOfANode) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const LoadTable load = test::bursty_load({.layers = 2, .ranks = 6, .experts = 24, .ranks_per_node = 4}, seed);
    for (const FeplbOptions& options :
         {FeplbOptions{}, FeplbOptions{.dyn = 2, .try_smaller = true}, FeplbOptions{.first_experts = true}}) {
      const StepPlan before = plan_of({.dyn = 0}, load, 2);
      const StepPlan after = plan_of(options, load, 2);
      const auto largest = [&](const StepPlan& plan, int m, int l, int first, int end) {
        std::int64_t of_node = 0;
        for (int r = first; r < end; ++r) {
          std::int64_t of_rank = 0;
          for (const Tokens tokens : plan.slot_tokens.row(m, l, r)) of_rank += tokens.value;
          of_node = std::max(of_node, of_rank);
        }
        return of_node;
      };
      for (int m = 0; m < load.num_micro_steps(); ++m) {
        for (int l = 0; l < load.num_layers(); ++l) {
          EXPECT_LE(largest(after, m, l, 0, 4), largest(before, m, l, 0, 4));
          EXPECT_LE(largest(after, m, l, 4, 6), largest(before, m, l, 4, 6));
        }
      }
    }
  }
}

TEST(Feplb, PlansEveryTimeTheSameForAnyNumberOfThreads) {
  const LoadTable load = test::bursty_load({.layers = 5}, 1);
  const StepPlan plan = plan_of({}, load, 2);
  for (const std::size_t threads : {1, 3}) {
    const StepPlan again = plan_of({}, load, 2, threads);
    EXPECT_EQ(plan.slot_expert, again.slot_expert);
    EXPECT_EQ(plan.slot_tokens, again.slot_tokens);
  }
}

TEST(Feplb, PlansAndCopiesWhileOwnExpertsCompute) {
  EXPECT_TRUE(make_feplb()->online().copies_after_router);
  EXPECT_TRUE(make_feplb()->online().own_experts_first);
  EXPECT_TRUE(make_feplb()->online().plans_after_dispatch);
  EXPECT_EQ(make_feplb()->online().planning_seconds, 50e-6);
}

TEST(Feplb, ChargesTheReturnOfResultsByDefault) {
  EXPECT_TRUE(make_feplb()->online().results_return);
  PolicyWithOptions feplb = policy_with_options(policy_named("feplb"));
  option_named(feplb.options, "charge_return").set("0");
  EXPECT_FALSE(feplb.policy->online().results_return);
}

// 128 experts, popularity ∝ rank^−0.42 in a new order for every micro-step. The exponent is fitted to the 18.6 % of
// time wasted before balancing at EP8, the only figure taken from the paper.
class FeplbStraggler : public testing::Test {
 protected:
  static LoadTable load(int num_ranks) {
    return synthesize_load({.num_layers = 6,
                            .num_experts = 128,
                            .top_k = 8,
                            .num_micro_steps = 12,
                            .num_ranks = num_ranks,
                            .tokens_per_rank = 4096},
                           ZipfRouting{.skew = 0.42, .permute_probability = 1});
  }

  // Mean excess of the busiest rank over the mean load, in tokens.
  static double straggler(const FeplbOptions& options, const LoadTable& load) {
    const Array<Tokens, 2> max_load = plan_of(options, load, 8).max_load;
    double sum = 0;
    for (const Tokens tokens : max_load.flat()) sum += static_cast<double>(tokens.value) - kMean;
    return sum / static_cast<double>(max_load.size());
  }

  static constexpr double kMean = 4096 * 8;
};

TEST_F(FeplbStraggler, MatchesThePublishedWasteBeforeBalancing) {
  double waste = 0;
  const Array<Tokens, 2> max_load = plan_of({.dyn = 0}, load(8), 8).max_load;
  for (const Tokens tokens : max_load.flat()) waste += 1 - kMean / static_cast<double>(tokens.value);
  EXPECT_NEAR(waste / static_cast<double>(max_load.size()), 0.186, 0.01);
}

// The paper reports 63 % and 70 % less at EP4 and EP8. Doubling `dyn` gains 1 to 3 points.
TEST_F(FeplbStraggler, ShrinksAsPublishedWithFourAndEightRanks) {
  for (const auto& [num_ranks, published] : {std::pair{4, 0.63}, {8, 0.70}}) {
    const LoadTable table = load(num_ranks);
    const double before = straggler({.dyn = 0}, table);
    const double removed = 1 - straggler({}, table) / before;
    EXPECT_NEAR(removed, published, 0.06) << num_ranks;
    for (const int dyn : {2, 8}) EXPECT_NEAR(1 - straggler({.dyn = dyn}, table) / before, removed, 0.03) << dyn;
  }
}

// The paper reports 51 % less. This routing does not reproduce that figure.
TEST_F(FeplbStraggler, ShrinksMoreThanPublishedWithTwoRanks) {
  const LoadTable table = load(2);
  EXPECT_GT(1 - straggler({}, table) / straggler({.dyn = 0}, table), 0.60);
}

// Tests the other readings of the search and of dynamic experts, which do not match the published results.
TEST_F(FeplbStraggler, DiffersFromThePublishedResultsUnderOtherReadings) {
  const LoadTable table = load(8);
  const double before = straggler({.dyn = 0}, table);
  const auto removed = [&](FeplbOptions options) { return 1 - straggler(options, table) / before; };
  EXPECT_GT(removed({.try_smaller = true}), 0.80);
  constexpr FeplbOptions kTwoFirst = {.dyn = 2, .first_experts = true};
  constexpr FeplbOptions kFourFirst = {.dyn = 4, .first_experts = true};
  EXPECT_GT(removed(kFourFirst) - removed(kTwoFirst), 0.15);  // published: 1 to 3 points
}

}  // namespace
}  // namespace foremoe
