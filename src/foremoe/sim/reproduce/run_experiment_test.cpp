#include "foremoe/sim/reproduce/run_experiment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "foremoe/sim/reproduce/experiment_file.h"
#include "foremoe/sim/reproduce/result_text.h"
#include "foremoe/sim/reproduce/test_experiment_text.h"

namespace foremoe {
namespace {

// Workload w2 on 4 ranks: the hot rank has 2.5 times the mean in every micro-step. 100 tokens of a rank choose 2
// experts each, so the mean is 200, the busiest rank has 500.
const std::string kHotRank = std::string(test::kExperimentHead) + R"(
columns = ["rho_mean", "straggler", "waste", "from_2", "straggler_less", "copies"]

[[input]]
label = "w2"
routing = "w2"
ranks = 4
experts = 16
top_k = 2
layers = 1
micro_steps = 2
tokens_per_rank = 100

[[system]]
label = "none"
policy = "vanilla"

[[system]]
label = "ours"
policy = "foremoe"
guest_slots = 4
tolerance = 0

[[published]]
input = "w2"
system = "none"
column = "rho_mean"
value = 2.4

[[aim]]
column = "rho_mean"
system = "ours"
at_most = 1.0

[[aim]]
column = "straggler"
at_most = 250

[[aim]]
column = "rho_mean"
system = "ours"
relative_to = "none"
at_least = 0.4
at_most = 0.4
)";

ExperimentResult result_of(std::string_view text) {
  ThreadPool pool(1);
  return run_experiment(parse_experiment(text, "hot-rank.toml"), pool);
}

TEST(RunExperiment, AHotRankHasTheFiguresThatItsDefinitionSays) {
  const ExperimentResult result = result_of(kHotRank);
  EXPECT_THAT(result.cells[0][0].of_columns, testing::ElementsAre(2.5, 300, 60, 100, 0, 0));
  EXPECT_DOUBLE_EQ(result.cells[0][1].of_columns[0], 1.0);
  EXPECT_DOUBLE_EQ(result.cells[0][1].of_columns[1], 0);
  EXPECT_DOUBLE_EQ(result.cells[0][1].of_columns[4], 100);
  EXPECT_GT(result.cells[0][1].of_columns[5], 0);
}

TEST(RunExperiment, AimsAreJudgedByTheFigureClosestToMissingThem) {
  const auto judged = judge(result_of(kHotRank));
  ASSERT_EQ(judged.size(), 3);
  EXPECT_TRUE(judged[0].met);
  EXPECT_FALSE(judged[1].met);
  EXPECT_DOUBLE_EQ(judged[1].worst, 300);
  EXPECT_EQ(judged[1].figures, 2);
  EXPECT_TRUE(judged[2].met) << judged[2].worst;
}

TEST(RunExperiment, ATableShowsOurFigureBesideThePublishedOne) {
  const auto rows = to_rows(result_of(kHotRank));
  ASSERT_EQ(rows.size(), 3);
  EXPECT_THAT(rows[0], testing::ElementsAre("input", "system", "ρ mean", "published", "straggler", "waste, %",
                                            "ρ ≥ 2, %", "straggler, % less", "copies"));
  EXPECT_THAT(rows[1], testing::ElementsAre("w2", "none", "2.5000", "2.4", "300", "60.0", "100.0", "0.0", "0.0"));
  EXPECT_EQ(rows[2][3], "–");
}

TEST(RunExperiment, ASectionHoldsWhatTheFileSaysAndWhetherAimsAreMet) {
  const std::string text = to_markdown(result_of(kHotRank));
  for (const char* words : {"## hot-rank: A hot rank", "About.", "Reading.", "Finding.", "foremoe reproduce hot-rank",
                            "Aim: ρ mean of ours ≤ 1: met, it is 1.0000",
                            "Aim: straggler ≤ 250: missed, the worst is 300", "Exact: ρ mean;"}) {
    EXPECT_THAT(text, testing::HasSubstr(words));
  }
}

TEST(RunExperiment, AnInputWhoseFileIsMissingIsSkippedAndNotMadeUp) {
  const ExperimentResult result =
      result_of(test::with(kHotRank, "label = \"w2\"", "label = \"w2\"\nfile = \"no/such/file.safetensors\""));
  EXPECT_FALSE(result.cells[0][0].measured.has_value());
  EXPECT_THAT(result.cells[0][0].skipped, testing::HasSubstr("no/such/file.safetensors"));
  EXPECT_TRUE(std::isnan(result.cells[0][1].of_columns[0]));
  EXPECT_FALSE(judge(result)[0].met);
}

}  // namespace
}  // namespace foremoe
