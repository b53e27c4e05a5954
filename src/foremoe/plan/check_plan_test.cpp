// Tests that valid plans pass and that the checker reports which checks it skips.

#include "foremoe/plan/check_plan.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/plan/check_rules.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/valid_plan.h"

namespace foremoe {
namespace {

using test::first_message;

struct KindOfPlan {
  test::PlanShape shape;
  test::Shape load;
};

void PrintTo(const KindOfPlan& kind, std::ostream* out) {
  *out << fmt::format("{}G{}K{}R{}", to_string(kind.shape.residency), kind.shape.guest_slots, kind.shape.in_flight,
                      kind.load.ranks);
}

class CheckGoodPlan : public testing::TestWithParam<KindOfPlan> {};

TEST_P(CheckGoodPlan, FindsNoViolationAndTheSameFigures) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const LoadTable load = test::random_load(GetParam().load, seed);
    const StepPlan plan = test::random_plan(load, GetParam().shape, seed);
    const PlanFigures figures = plan_figures(plan, load);
    const CheckReport report = check_plan(plan, load, {.reported = &figures});
    EXPECT_TRUE(report.ok()) << first_message(report);
    EXPECT_TRUE(report.figures);
    EXPECT_THAT(report.not_checked, testing::IsEmpty());
  }
}

std::vector<KindOfPlan> good_plans() {
  std::vector<KindOfPlan> plans;
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}) {
    for (const int guest_slots : {0, 1, 3}) {
      for (const int in_flight : {1, 2, 4}) {
        if (residency == Residency::kFree && in_flight > 1) continue;
        for (const test::Shape& load : {test::Shape{.micro_steps = 5}, test::Shape{.ranks = 1, .experts = 4},
                                        test::Shape{.ranks = 6, .experts = 12, .ranks_per_node = 2},
                                        test::Shape{.ranks = 3, .experts = 3, .ranks_per_node = 2}}) {
          plans.push_back({{residency, guest_slots, in_flight}, load});
        }
      }
    }
  }
  return plans;
}

INSTANTIATE_TEST_SUITE_P(OfEveryKind, CheckGoodPlan, testing::ValuesIn(good_plans()),
                         testing::PrintToStringParamName());

TEST(CheckPlan, RecomputesRowFiguresIfTheTokensAreKnown) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const test::CountedTrace batched = test::random_trace(seed, 40);
    const StepPlan plan = test::random_plan(batched.load, {.guest_slots = 2, .in_flight = 2}, seed);
    const FiguresOptions with_tokens{.tokens = &batched};
    const PlanFigures figures = plan_figures(plan, batched.load, with_tokens);
    ASSERT_GT(figures.node_link_rows->max, 0);
    ASSERT_LT(figures.node_link_rows->max, figures.node_link_tokens.max);
    const CheckReport report = check_plan(plan, batched.load, {.tokens = &batched, .reported = &figures});
    EXPECT_TRUE(report.ok()) << first_message(report);
    EXPECT_THAT(report.not_checked, testing::IsEmpty());
  }
}

TEST(CheckPlan, ReportsATraceThatDoesNotMatchTheLoad) {
  const test::CountedTrace batched = test::random_trace(1);
  const test::CountedTrace other = test::random_trace(2);
  const StepPlan plan = test::random_plan(batched.load, {}, 1);
  const CheckReport report = check_plan(plan, batched.load, {.tokens = &other});
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.not_checked.size(), 1u);
  EXPECT_FALSE(report.figures->node_link_rows);
}

// The routes were those of the load when check_plan() compared them, and then another process changed them.
TEST(CheckPlan, RefusesRoutesThatChangedSinceTheyWereCompared) {
  const test::CountedTrace batched = test::random_trace(1);
  const test::CountedTrace other = test::random_trace(2);
  const StepPlan plan = test::random_plan(batched.load, {}, 1);
  const CheckOptions options{.tokens = &batched};
  const SourceTokens tokens(other.trace, other.batching);
  EXPECT_THROW(check::recompute_figures({plan, batched.load, options, &tokens}), InputError);
}

TEST(CheckPlan, AcceptsPlansWithinTheirBudgets) {
  test::ValidPlan good(Residency::kResident, 1);
  for (const char* options : {R"({"max-copies-per-rank": 1, "max-copies-per-source": 4, "rehome": "free"})",
                              R"({"max-copies-per-rank": "none", "max-copies-per-source": "none", "rehome": 16})",
                              R"({"max-copies-per-source": 2147483647, "homes": "contiguous", "rehome": 0})"}) {
    good.record(nlohmann::json::parse(options));
    const CheckReport report = check_plan(good.plan, good.load);
    EXPECT_TRUE(report.ok()) << options << first_message(report);
  }
}

// CPU seconds to check a plan with this many micro-steps, one layer, one rank and one expert.
double seconds_to_check(int micro_steps, int in_flight) {
  LoadTable load{.load = Array<Tokens, 4>({std::size_t(micro_steps), 1, 1, 1}, Tokens{1})};
  StepPlan plan = empty_plan(
      {.in_flight = in_flight, .options = test::recorded_options({.guest_slots = 0, .in_flight = in_flight})}, load);
  for (ExpertId& e : plan.slot_expert.flat()) e = ExpertId{0};
  for (Tokens& quota : plan.slot_tokens.flat()) quota = Tokens{1};
  for (Tokens& tokens : plan.max_load.flat()) tokens = Tokens{1};
  for (Tokens& tokens : plan.lower_bound.flat()) tokens = Tokens{1};
  const std::clock_t begin = std::clock();
  const CheckReport report = check_plan(plan, load);
  EXPECT_TRUE(report.ok()) << first_message(report);
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

TEST(CheckPlan, TakesLinearTimeInTheMicroSteps) {
  for (const int in_flight : {1, 2}) {
    const double some = seconds_to_check(30'000, in_flight);
    EXPECT_LT(seconds_to_check(120'000, in_flight), 8 * some) << in_flight << " in flight";
  }
}

TEST(CheckPlan, ReportsThatHomeMovesAreNotCheckedIfInitialHomesAreUnknown) {
  test::ValidPlan good(Residency::kResident, 1);
  good.record({{"homes", "last-step.safetensors"}});
  const CheckReport report = check_plan(good.plan, good.load);
  EXPECT_TRUE(report.ok());
  EXPECT_THAT(report.not_checked, testing::ElementsAre(testing::HasSubstr("last-step.safetensors")));
}

}  // namespace
}  // namespace foremoe
