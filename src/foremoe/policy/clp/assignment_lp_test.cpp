// Compares stage T's optimum with a linear program solved by CLP.

#include <gtest/gtest.h>

#include <ClpSimplex.hpp>
#include <cmath>
#include <numeric>

#include "foremoe/testing/assignment_instances.h"

namespace foremoe::planner {
namespace {

// LP 1 of FineMoE: minimise t such that quotas sum to their expert's load, and to at most t on each rank.
double lp_optimum(const Instance& i) {
  const int num_experts = i.graph.num_experts();
  const int num_ranks = i.graph.num_ranks();
  CoinPackedMatrix columns(true, 0, 0);
  columns.setDimensions(num_experts + num_ranks, 0);
  for (int s = 0; s < i.graph.num_slots(); ++s) {
    if (i.graph.expert_in(s) < 0) continue;
    const int rows[] = {i.graph.expert_in(s), num_experts + i.graph.rank_of(s)};
    const double ones[] = {1, 1};
    columns.appendCol(2, rows, ones);
  }
  std::vector<int> rank_rows(num_ranks);
  std::iota(rank_rows.begin(), rank_rows.end(), num_experts);
  columns.appendCol(num_ranks, rank_rows.data(), std::vector<double>(num_ranks, -1).data());
  std::vector<double> lower(i.load.begin(), i.load.end());
  std::vector<double> upper = lower;
  lower.resize(num_experts + num_ranks, -COIN_DBL_MAX);
  upper.resize(num_experts + num_ranks, 0);
  std::vector<double> cost(columns.getNumCols(), 0);
  cost.back() = 1;
  ClpSimplex lp;
  lp.setLogLevel(0);
  lp.loadProblem(columns, nullptr, nullptr, cost.data(), lower.data(), upper.data());
  lp.dual();
  EXPECT_TRUE(lp.isProvenOptimal());
  return lp.objectiveValue();
}

TEST(AssignTokens, ReachesTheCeilingOfTheLinearProgram) {
  Random random(1);
  for (int n = 0; n < 3000; ++n) {
    const Instance i = random_instance(random, {.ranks = 12, .experts = 24, .load = 1000});
    ASSERT_EQ(solve(i), static_cast<std::int64_t>(std::ceil(lp_optimum(i) - 1e-6))) << "instance " << n;
  }
}

TEST(AssignTokens, ReachesTheCeilingOfTheLinearProgramBeyond64Ranks) {
  Random random(2);
  for (int n = 0; n < 40; ++n) {
    Instance i = random_instance(random, {.ranks = 150, .experts = 300, .load = 1000});
    ASSERT_EQ(solve(i), static_cast<std::int64_t>(std::ceil(lp_optimum(i) - 1e-6))) << "instance " << n;
  }
}

}  // namespace
}  // namespace foremoe::planner
