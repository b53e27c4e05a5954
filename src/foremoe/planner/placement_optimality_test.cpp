// Whole placements against every placement there is: one layer so small that all choices of guests can be tried.

#include <gtest/gtest.h>

#include <cmath>

#include "foremoe/planner/test_steps.h"

namespace foremoe {
namespace {

using planner::LayerProblem;
using planner::ReplicaGraph;
using test::ExpertLoads;

struct Sizes {
  int ranks;
  int experts;
  std::int64_t most;  // tokens of an expert
  int guest_slots = 1;
};

// All loads up to `most` tokens per expert, without those that only rename: where every rank is home of one expert,
// loads ascend.
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

// The smallest largest rank load of one micro-step over all guests, and the fewest guests that reach it.
struct Best {
  std::int64_t max_load;
  int guests;
};

Best brute_force(const LayerProblem& problem) {
  Best best{std::numeric_limits<std::int64_t>::max(), 0};
  ReplicaGraph graph = homes_only(problem);
  test::for_all_guests(problem, graph, [&](const ReplicaGraph& placed) {
    const std::int64_t max_load = test::optimum_on(placed, problem.load(0));
    int guests = -problem.num_experts;
    for (int s = 0; s < placed.num_slots(); ++s) guests += placed.expert_in(s) >= 0 ? 1 : 0;
    if (max_load < best.max_load || (max_load == best.max_load && guests < best.guests)) best = {max_load, guests};
  });
  return best;
}

struct Tally {
  int instances = 0;
  int optimal = 0;
  double rho = 0;  // sums over the instances
  double best_rho = 0;
  double worst_gap = 1;  // largest load of the plan ÷ the best
  std::int64_t guests = 0;
  std::int64_t best_guests = 0;  // of the instances where the plan is optimal
};

Tally plan_all(const Sizes& sizes, Residency residency) {
  Tally tally;
  const PlannerOptions options{.guest_slots = sizes.guest_slots, .residency = residency};
  for (const auto& load : all_loads(sizes)) {
    const std::int64_t total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
    if (total == 0) continue;
    SCOPED_TRACE(testing::PrintToString(load));
    const LoadTable table = test::load_of(sizes.ranks, {load});
    const Best best = brute_force(test::problem_of(table, options));
    const test::Planned planned = test::plan_checked(table, options);
    const std::int64_t max_load = planned.plan.max_load(0, 0).value;
    EXPECT_GE(max_load, best.max_load);
    const double mean = static_cast<double>(total) / sizes.ranks;
    ++tally.instances;
    tally.rho += static_cast<double>(max_load) / mean;
    tally.best_rho += static_cast<double>(best.max_load) / mean;
    tally.worst_gap = std::max(tally.worst_gap, static_cast<double>(max_load) / static_cast<double>(best.max_load));
    if (max_load != best.max_load) continue;
    ++tally.optimal;
    tally.guests += planned.figures.copies;
    tally.best_guests += best.guests;
    if (testing::Test::HasFailure()) break;
  }
  return tally;
}

class EverySmallPlacement : public testing::TestWithParam<std::tuple<Sizes, Residency>> {};

void PrintTo(const Sizes& s, std::ostream* out) {
  *out << s.experts << " experts on " << s.ranks << " ranks, G = " << s.guest_slots;
}

TEST_P(EverySmallPlacement, IsNearTheBestOfAllAndNeverBetter) {
  const auto& [sizes, residency] = GetParam();
  const Tally tally = plan_all(sizes, residency);
  std::printf("instances %d optimal %.4f rho %.5f best %.5f worst %.3f guests %ld best %ld\n", tally.instances,
              double(tally.optimal) / tally.instances, tally.rho / tally.instances, tally.best_rho / tally.instances,
              tally.worst_gap, long(tally.guests), long(tally.best_guests));
}

INSTANTIATE_TEST_SUITE_P(Of, EverySmallPlacement,
                         testing::Combine(testing::Values(Sizes{2, 2, 20}, Sizes{2, 4, 5}, Sizes{3, 3, 14},
                                                          Sizes{3, 6, 2}, Sizes{4, 4, 8}, Sizes{5, 5, 5},
                                                          Sizes{2, 4, 4, 2}, Sizes{3, 3, 9, 2}, Sizes{4, 4, 5, 2}),
                                          testing::ValuesIn(test::kAllResidencies)));

}  // namespace
}  // namespace foremoe
