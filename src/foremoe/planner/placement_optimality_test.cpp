// Compares placements with all possible placements, for one layer small enough to enumerate.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe {
namespace {

using planner::LayerProblem;
using planner::ReplicaGraph;
using test::ExpertLoads;

struct Sizes {
  int ranks;
  int experts;
  std::int64_t most;  // tokens per expert
  int guest_slots = 1;
};

// All loads of up to `most` tokens per expert. If every rank is home to one expert, returns only ascending loads, since
// other orders only permute ranks.
std::vector<std::vector<std::int64_t>> all_loads(const Sizes& sizes) {
  std::vector<std::vector<std::int64_t>> all;
  std::vector<std::int64_t> load(sizes.experts, 0);
  for (;;) {
    if (sizes.experts != sizes.ranks || std::ranges::is_sorted(load)) all.push_back(load);
    int e = 0;
    while (e < sizes.experts && load[e] == sizes.most) load[e++] = 0;
    if (e == sizes.experts) return all;
    ++load[e];
  }
}

// Minimum largest rank load of one micro-step over all choices of guests, and the fewest guests that reach it or the
// target.
struct Best {
  std::int64_t max_load = std::numeric_limits<std::int64_t>::max();
  int guests = std::numeric_limits<int>::max();
};

Best brute_force(const LayerProblem& problem) {
  Best best;
  std::vector<std::pair<std::int64_t, int>> all;  // max load, guests
  ReplicaGraph graph = homes_only(problem);
  test::for_all_guests(problem, graph, [&](const ReplicaGraph& placed) {
    int guests = -problem.num_experts;
    for (int s = 0; s < placed.num_slots(); ++s) guests += placed.expert_in(s) >= 0 ? 1 : 0;
    all.emplace_back(test::optimum_on(placed, problem.load(0)), guests);
    best.max_load = std::min(best.max_load, all.back().first);
  });
  for (const auto& [max_load, guests] : all) {
    if (max_load <= std::max(best.max_load, problem.target[0])) best.guests = std::min(best.guests, guests);
  }
  return best;
}

struct Tally {
  int instances = 0;
  int optimal = 0;
  double rho = 0;                // sum over the instances
  double best_rho = 0;           // as rho, for brute force
  double worst = 1;              // maximum over the instances of max load ÷ brute-force max load
  std::int64_t copies = 0;       // of the optimal plans
  std::int64_t best_guests = 0;  // minimum number of guests for the optimal plans
};

// Plans one micro-step and compares it with brute force. A largest load within the target counts as optimal.
void plan_one(const Sizes& sizes, Residency residency, const std::vector<std::int64_t>& load, Tally& tally) {
  SCOPED_TRACE(testing::PrintToString(load));
  const PlannerOptions options{.guest_slots = sizes.guest_slots, .residency = residency};
  const LoadTable table = test::load_of(sizes.ranks, {load});
  const LayerProblem problem = test::problem_of(table, options);
  if (problem.lower_bound[0] == 0) return;
  const Best best = brute_force(problem);
  const test::Planned planned = test::plan_checked(table, options);
  const std::int64_t max_load = planned.plan.max_load(0, 0).value;
  if (residency != Residency::kFree) {  // `free` may also exchange homes and then be better
    ASSERT_GE(max_load, best.max_load) << "better than the best of all placements";
  }
  ++tally.instances;
  tally.rho += static_cast<double>(max_load) * problem.per_mean[0];
  tally.best_rho += static_cast<double>(best.max_load) * problem.per_mean[0];
  tally.worst = std::max(tally.worst, static_cast<double>(max_load) / static_cast<double>(best.max_load));
  if (max_load > std::max(best.max_load, problem.target[0])) return;
  ++tally.optimal;
  tally.copies += planned.figures.copies;
  tally.best_guests += best.guests;
}

void expect_near_optimal(const Sizes& sizes, Residency residency, const Tally& tally) {
  const bool is_static = residency == Residency::kStatic;
  EXPECT_GE(tally.optimal, (is_static ? 0.95 : 0.99) * tally.instances);
  EXPECT_LE(tally.rho, (is_static ? 1.01 : 1.005) * tally.best_rho);
  EXPECT_LE(tally.worst, 1.5);
  EXPECT_LE(static_cast<double>(tally.copies), 1.07 * static_cast<double>(tally.best_guests)) << "copies nobody needs";
  if (sizes.ranks == 2) {
    EXPECT_EQ(tally.optimal, tally.instances) << "with two ranks there is nothing to get wrong";
  }
}

using Parameters = std::tuple<Sizes, Residency>;

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
  const auto& [sizes, residency] = info.param;
  return fmt::format("{}_experts_{}_ranks_{}_guest_slots_{}", sizes.experts, sizes.ranks, sizes.guest_slots,
                     to_string(residency));
}

class EverySmallPlacement : public testing::TestWithParam<Parameters> {};

TEST_P(EverySmallPlacement, IsNearTheOptimumAndNeverBelowIt) {
  const auto& [sizes, residency] = GetParam();
  Tally tally;
  for (const auto& load : all_loads(sizes)) {
    plan_one(sizes, residency, load, tally);
    if (HasFailure()) return;
  }
  expect_near_optimal(sizes, residency, tally);
}

INSTANTIATE_TEST_SUITE_P(Of, EverySmallPlacement,
                         testing::Combine(testing::Values(Sizes{2, 2, 20}, Sizes{2, 4, 5}, Sizes{3, 3, 14},
                                                          Sizes{3, 6, 2}, Sizes{4, 4, 8}, Sizes{5, 5, 5},
                                                          Sizes{2, 4, 4, 2}, Sizes{3, 3, 9, 2}, Sizes{4, 4, 5, 2}),
                                          testing::ValuesIn(test::kAllResidencies)),
                         name_of);

class RandomPlacement : public testing::TestWithParam<Parameters> {};

TEST_P(RandomPlacement, IsNearTheOptimumAndNeverBelowIt) {
  const auto& [sizes, residency] = GetParam();
  Tally tally;
  Random random(1);
  for (int n = 0; n < 100; ++n) {
    std::vector<std::int64_t> load(sizes.experts);
    for (std::int64_t& tokens : load) {
      tokens = static_cast<std::int64_t>(random.below(random.below(3) == 0 ? 1 + sizes.most : 1 + sizes.most / 4));
    }
    plan_one(sizes, residency, load, tally);
    if (HasFailure()) return;
  }
  expect_near_optimal(sizes, residency, tally);
}

INSTANTIATE_TEST_SUITE_P(Of, RandomPlacement,
                         testing::Combine(testing::Values(Sizes{2, 6, 10000}, Sizes{2, 6, 10000, 2}, Sizes{3, 6, 1000},
                                                          Sizes{4, 8, 1000}, Sizes{5, 5, 1000}, Sizes{3, 6, 30, 2}),
                                          testing::ValuesIn(test::kAllResidencies)),
                         name_of);

}  // namespace
}  // namespace foremoe
