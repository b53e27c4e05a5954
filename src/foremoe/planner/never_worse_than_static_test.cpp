// Every plan of residency `static` is also a plan of `resident`, so with default budgets `resident` is never worse. In
//   each micro-step, its largest rank load is at most the larger of its target and the load of `static`. If `static`
//   meets all targets of a layer, `resident` makes no more copies (above 16 ranks, at most 10 % more).

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe {
namespace {

using test::plan_checked;
using test::Planned;

// Rank load at which micro-step m of the layer is balanced, computed from the load alone.
std::int64_t target_of(const LoadTable& load, int m) {
  std::int64_t total = 0;
  for (int r = 0; r < load.num_ranks(); ++r) {
    for (const Tokens tokens : load.load.row(m, 0, r)) total += tokens.value;
  }
  const std::int64_t ranks = load.num_ranks();
  const auto tolerated = static_cast<std::int64_t>(
      std::floor(1.006 * (static_cast<double>(total) / static_cast<double>(ranks))));  // the default tolerance
  return std::max((total + ranks - 1) / ranks, tolerated);
}

void expect_no_worse_than_static(const LoadTable& load, int guest_slots) {
  const Planned resident = plan_checked(load, {.guest_slots = guest_slots});
  const Planned fixed = plan_checked(load, {.guest_slots = guest_slots, .residency = Residency::kStatic});
  bool static_meets_targets = true;
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    const std::int64_t target = target_of(load, m);
    const std::int64_t its = resident.plan.max_load(m, 0).value;
    const std::int64_t of_static = fixed.plan.max_load(m, 0).value;
    EXPECT_LE(its, std::max(target, of_static)) << "micro-step " << m << ", target " << target;
    static_meets_targets &= of_static <= target;
  }
  if (static_meets_targets) {
    const bool is_small = load.num_ranks() <= 16;
    EXPECT_LE(static_cast<double>(resident.figures.copies),
              (is_small ? 1.0 : 1.1) * static_cast<double>(fixed.figures.copies));
  }
}

struct Ranks {
  std::vector<int> choices;
  int steps;
  int most_homes;  // per rank
};

void PrintTo(const Ranks& ranks, std::ostream* out) { *out << ranks.choices.front() << " ranks and more"; }

class NeverWorseThanStatic : public testing::TestWithParam<Ranks> {};

INSTANTIATE_TEST_SUITE_P(From, NeverWorseThanStatic,
                         testing::Values(Ranks{{2, 3, 4, 6, 8}, 120, 16}, Ranks{{12, 16}, 40, 10},
                                         Ranks{{24, 32, 48, 64}, 12, 4}));

// Random popularity, topics, group sizes, lengths and shapes.
TEST_P(NeverWorseThanStatic, OnRandomSteps) {
  const Ranks& of = GetParam();
  Random random(of.choices.front());
  constexpr double kSpreads[] = {0.2, 0.4, 0.7, 1.0, 1.5};
  for (int step = 0; step < of.steps; ++step) {
    const int ranks = of.choices[random.below(of.choices.size())];
    const int experts = ranks * static_cast<int>(1 + random.below(of.most_homes));
    const SynthesisOptions shape{.num_layers = 1,
                                 .num_experts = experts,
                                 .top_k = std::min(experts, static_cast<int>(1 + random.below(8))),
                                 .num_micro_steps = static_cast<int>(1 + random.below(32)),
                                 .num_ranks = ranks,
                                 .ranks_per_node = std::min(ranks, 8),
                                 .tokens_per_rank = 64 << random.below(6),
                                 .sequences_per_rank = static_cast<int>(1 + random.below(4)),
                                 .group_size = 1 << random.below(5),
                                 .seed = static_cast<std::uint64_t>(step)};
    const GrpoRouting routing{.step_spread = kSpreads[random.below(5)], .group_spread = kSpreads[random.below(5)]};
    const int guest_slots = static_cast<int>(1 + random.below(random.below(3) == 0 ? 4 : 2));
    SCOPED_TRACE(testing::Message() << "step " << step << ": " << ranks << " ranks, " << experts << " experts, "
                                    << shape.num_micro_steps << " micro-steps, G = " << guest_slots);
    expect_no_worse_than_static(synthesize_load(shape, routing), guest_slots);
  }
}

}  // namespace
}  // namespace foremoe
