// Tests stage B, homes: the limit of moves, and the balance gained.

#include "foremoe/planner/rehoming.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe::planner {
namespace {

int num_moved(const LayerProblem& p, const std::vector<int>& home) {
  int moved = 0;
  for (int e = 0; e < p.num_experts; ++e) moved += home[e] != p.home[e] ? 1 : 0;
  return moved;
}

// Mean imbalance ratio over micro-steps with every expert served at home.
double rho_at(const LayerProblem& p, const std::vector<int>& home) {
  double sum = 0;
  for (int m = 0; m < p.num_micro_steps; ++m) {
    std::vector<std::int64_t> rank_load(p.num_ranks());
    std::int64_t total = 0;
    for (int e = 0; e < p.num_experts; ++e) {
      rank_load[home[e]] += p.load(m)[e];
      total += p.load(m)[e];
    }
    sum += static_cast<double>(*std::ranges::max_element(rank_load) * p.num_ranks()) / static_cast<double>(total);
  }
  return sum / p.num_micro_steps;
}

void expect_equal_shares(const LayerProblem& p, const std::vector<int>& home) {
  for (int r = 0; r < p.num_ranks(); ++r) ASSERT_EQ(std::ranges::count(home, r), p.homes_per_rank());
}

TEST(Rehome, RespectsTheMoveLimitAndHomesPerRank) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const LayerProblem p = test::problem_of(test::bursty_load({.ranks = 4, .experts = 24}, seed), {});
    for (const int permitted : {0, 1, 2, 3, 4, 7, 24, kNoLimit}) {
      const std::vector<int> home = rehome(p, permitted);
      expect_equal_shares(p, home);
      ASSERT_LE(num_moved(p, home), permitted);
      ASSERT_LE(rho_at(p, home), rho_at(p, p.home) + 1e-6) << permitted << " moves made it worse";
    }
  }
}

TEST(Rehome, ChangesNothingWithoutMovesAndAtPerfectBalance) {
  const LayerProblem even = test::problem_of(test::load_of(3, {{5, 5, 5, 5, 5, 5}, {9, 1, 1, 9, 5, 5}}), {});
  EXPECT_EQ(rehome(even, kNoLimit), even.home);
  const LayerProblem uneven = test::problem_of(test::load_of(2, {{9, 9, 1, 1}}), {});
  EXPECT_EQ(rehome(uneven, 0), uneven.home);
  EXPECT_EQ(rehome(uneven, 1), uneven.home) << "one expert alone cannot move: every rank has its share of homes";
}

TEST(Rehome, SeparatesTwoHotExpertsByOneExchange) {
  const LayerProblem p = test::problem_of(test::load_of(2, {{90, 90, 10, 10}, {80, 80, 20, 20}}), {});
  const std::vector<int> home = rehome(p, 2);
  EXPECT_NE(home[0], home[1]);
  EXPECT_DOUBLE_EQ(rho_at(p, home), 1.0);
}

// The load is balanced on the step's mean, but in no micro-step.
TEST(Rehome, BalancesMicroStepsAndNotJustTheirMean) {
  const LayerProblem p = test::problem_of(test::load_of(2, {{50, 50, 0, 0}, {0, 0, 50, 50}}), {});
  ASSERT_DOUBLE_EQ(rho_at(p, p.home), 2.0);
  EXPECT_DOUBLE_EQ(rho_at(p, rehome(p, kNoLimit)), 1.0);
}

// Enumerates all homes with E/R experts per rank.
double best_rho(const LayerProblem& p) {
  std::vector<int> home = p.home;
  std::ranges::sort(home);
  double best = rho_at(p, home);
  while (std::ranges::next_permutation(home).found) best = std::min(best, rho_at(p, home));
  return best;
}

TEST(Rehome, IsNearTheOptimum) {
  Random random(1);
  double found = 0;
  double best = 0;
  for (int n = 0; n < 150; ++n) {
    const int ranks = 2 + static_cast<int>(random.below(2));
    test::ExpertLoads loads(1 + random.below(3), std::vector<std::int64_t>(6));
    for (auto& of_experts : loads) {
      for (std::int64_t& load : of_experts) load = 10 + static_cast<std::int64_t>(random.below(1000));
    }
    const LayerProblem p = test::problem_of(test::load_of(ranks, loads), {});
    const double rho = rho_at(p, rehome(p, kNoLimit));
    ASSERT_GE(rho, best_rho(p) - 1e-9);
    found += rho;
    best += best_rho(p);
  }
  EXPECT_LE(found, best * 1.005);
}

}  // namespace
}  // namespace foremoe::planner
