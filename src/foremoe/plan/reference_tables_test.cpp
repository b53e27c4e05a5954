// Checks the load tables and rollouts in data/. Their imbalance without a planner matches the published figure.
// plan_figures and check_plan agree on a random plan.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "foremoe/plan/check_plan.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

struct Reference {
  const char* table;
  double rho_mean;  // at homes in contiguous blocks, three digits
  double rho_max;
};

void PrintTo(const Reference& reference, std::ostream* out) { *out << reference.table; }

class ReferenceTable : public testing::TestWithParam<Reference> {
 protected:
  void SetUp() override {
    const std::string path = fmt::format("data/load-{}.safetensors", GetParam().table);
    load_ = read_load(path);
  }
  LoadTable load_;
};

TEST_P(ReferenceTable, HasThePublishedImbalanceAtHomes) {
  const PlanFigures figures = plan_figures(test::random_plan(load_, {.guest_slots = 0}, 1), load_);
  EXPECT_NEAR(figures.rho.mean, GetParam().rho_mean, 0.0005001);
  EXPECT_NEAR(figures.rho.max, GetParam().rho_max, 0.0005001);
  EXPECT_EQ(figures.copies, 0);
}

TEST_P(ReferenceTable, HasTheSameFiguresInTheCheckerForARandomPlan) {
  const StepPlan plan = test::random_plan(load_, {.guest_slots = 1, .in_flight = 2}, 1);
  const PlanFigures figures = plan_figures(plan, load_);
  const CheckReport report = check_plan(plan, load_, {.reported = &figures});
  EXPECT_TRUE(report.ok()) << (report.violations.empty() ? "" : report.violations.front().message);
}

INSTANTIATE_TEST_SUITE_P(
    Of, ReferenceTable,
    testing::Values(Reference{"q30-ep8", 1.421, 2.104}, Reference{"q30-ep8-bursty", 1.650, 2.406},
                    Reference{"q30-ep16", 1.661, 2.363}, Reference{"q30-ep16-bursty", 2.315, 4.216},
                    Reference{"q30-ep64", 3.383, 4.943}, Reference{"q30-ep64-shuffled", 3.027, 3.591},
                    Reference{"q30-ep64-bursty", 3.626, 5.728}, Reference{"v3-ep64", 2.251, 2.963},
                    Reference{"v3-ep64-skewed", 4.263, 6.448}, Reference{"v3-ep64-bursty", 3.455, 5.904}));

TEST(RecordedRollout, PassesTheCheckersRowByRowRouting) {
  const std::string path = "data/rollout-math-full.safetensors";
  BatchedTrace tokens{.trace = read_trace(path)};
  tokens.batching = make_batching(tokens.trace, {.num_ranks = 8, .ranks_per_node = 2});
  ThreadPool pool(1);
  const LoadTable load = collect(tokens.trace, tokens.batching, pool);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 2}, 1);
  const PlanFigures figures = plan_figures(plan, load, {.tokens = &tokens});
  ASSERT_TRUE(figures.node_link_rows);
  EXPECT_LT(figures.node_link_rows->mean, figures.node_link_tokens.mean);
  const CheckReport report = check_plan(plan, load, {.tokens = &tokens, .reported = &figures});
  EXPECT_TRUE(report.ok()) << (report.violations.empty() ? "" : report.violations.front().message);
  EXPECT_TRUE(report.not_checked.empty());
}

}  // namespace
}  // namespace foremoe
