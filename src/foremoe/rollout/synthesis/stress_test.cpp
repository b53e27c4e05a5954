
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "foremoe/testing/load_figures.h"

namespace foremoe::testing {

using ::testing::Each;
using ::testing::Le;

// 64 ranks with 4 experts each, so that at top-8 an expert can exceed a rank's fair share.
const SynthesisOptions kOptions{.num_layers = 2,
                                .num_experts = 256,
                                .top_k = 8,
                                .num_micro_steps = 64,
                                .num_ranks = 64,
                                .tokens_per_rank = 512,
                                .seed = 2};

const LoadTable& load_of(StressWorkload workload) {
  static const std::vector<LoadTable> tables = [] {
    std::vector<LoadTable> all;
    for (int i = 0; i < kNumStressWorkloads; ++i)
      all.push_back(synthesize_load(kOptions, static_cast<StressWorkload>(i)));
    return all;
  }();
  return tables[static_cast<std::size_t>(workload)];
}

std::vector<std::int64_t> sorted(std::vector<std::int64_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}

// Assignments sent per [rank].
std::vector<std::int64_t> sent(const LoadTable& table, int m) {
  std::vector<std::int64_t> out;
  for (int r = 0; r < table.num_ranks(); ++r) {
    out.push_back(0);
    for (const Tokens t : table.load.row(m, 0, r)) out.back() += t.value;
  }
  return out;
}

TEST(StressWorkload, CanBeFoundByName) {
  for (int i = 0; i < kNumStressWorkloads; ++i) {
    const auto workload = static_cast<StressWorkload>(i);
    EXPECT_EQ(stress_workload_named(name_of(workload)), workload);
    EXPECT_FALSE(description_of(workload).empty());
  }
  EXPECT_EQ(stress_workload_named("w8"), std::nullopt);
}

TEST(StressWorkload, AllEightDiffer) {
  for (int a = 0; a < kNumStressWorkloads; ++a) {
    for (int b = 0; b < a; ++b)
      EXPECT_NE(load_of(static_cast<StressWorkload>(a)).load, load_of(static_cast<StressWorkload>(b)).load) << a << b;
  }
}

TEST(StressWorkload, W0GivesAllExpertsEqualLoadsWithinOneToken) {
  for (int m = 0; m < 64; ++m) {
    const auto loads = expert_loads(load_of(StressWorkload::kBalanced), m, 0);
    EXPECT_LE(largest(loads) - *std::min_element(loads.begin(), loads.end()), 1);
  }
}

TEST(StressWorkload, W1HasExpertsAboveAFairShareOnSeparateRanks) {
  const auto loads = expert_loads(load_of(StressWorkload::kHotExperts), 0, 0);
  const std::int64_t fair = sum(loads) / 64;
  std::set<std::size_t> ranks;
  for (std::size_t e = 0; e < loads.size(); ++e) {
    if (loads[e] > fair) ranks.insert(e / 4);
  }
  EXPECT_EQ(ranks, (std::set<std::size_t>{0, 8, 16, 24, 32, 40, 48, 56}));
}

TEST(StressWorkload, W2HasOneHotRankWithSmallExperts) {
  const LoadTable& table = load_of(StressWorkload::kHotRank);
  const auto ranks = home_loads(table, 0, 0);
  const std::int64_t fair = sum(ranks) / 64;
  EXPECT_NEAR(ratio(ranks), 3.0, 0.01);
  EXPECT_EQ(ranks[0], largest(ranks));
  EXPECT_EQ(std::count_if(ranks.begin(), ranks.end(), [=](std::int64_t load) { return load > fair; }), 1);
  EXPECT_THAT(expert_loads(table, 0, 0), Each(Le(fair)));
}

TEST(StressWorkload, W3HasTheLoadsOfW2OnOtherRanks) {
  const LoadTable& w2 = load_of(StressWorkload::kHotRank);
  const LoadTable& w3 = load_of(StressWorkload::kSpreadHeat);
  const auto a = sorted(expert_loads(w2, 0, 0));
  const auto b = sorted(expert_loads(w3, 0, 0));
  for (std::size_t e = 0; e < a.size(); ++e) EXPECT_NEAR(static_cast<double>(a[e]), static_cast<double>(b[e]), 1) << e;
  EXPECT_LT(mean_rho(w3), 1.6);
  EXPECT_GT(mean_rho(w2), 2.9);
}

TEST(StressWorkload, W4HasRaggedSourcesAndEvenExperts) {
  const LoadTable& table = load_of(StressWorkload::kRaggedSources);
  for (int m = 0; m < 64; ++m) {
    const auto out = sent(table, m);
    EXPECT_GT(ratio(out), 1.9);
    EXPECT_LT(*std::min_element(out.begin(), out.end()) * 20, largest(out));
    EXPECT_EQ(std::set(out.begin(), out.end()).size(), 64);  // all are different
    EXPECT_NEAR(static_cast<double>(sum(out)), 64.0 * 512 * 8, 64 * 8);
    EXPECT_LT(ratio(home_loads(table, m, 0)), 1.01);
  }
  EXPECT_NE(sent(table, 0), sent(table, 1));
  for (const auto even : {StressWorkload::kBalanced, StressWorkload::kHotRank})
    EXPECT_EQ(ratio(sent(load_of(even), 0)), 1.0);
}

TEST(StressWorkload, W5LeavesAQuarterOfTheRanksWithoutLoad) {
  const auto ranks = home_loads(load_of(StressWorkload::kZeroLoadRanks), 5, 1);
  for (std::size_t r = 0; r < 64; ++r) EXPECT_EQ(ranks[r] == 0, r >= 48) << r;
  EXPECT_NEAR(ratio(ranks), 64.0 / 48, 0.01);
}

TEST(StressWorkload, W6IsBalancedOnAverageButInNoMicroStep) {
  const LoadTable& table = load_of(StressWorkload::kRotatingHotSpot);
  for (int m = 0; m < 64; ++m) {
    const auto ranks = home_loads(table, m, 0);
    EXPECT_EQ(std::max_element(ranks.begin(), ranks.end()) - ranks.begin(), m);
    EXPECT_NEAR(ratio(ranks), 3.0, 0.01);
  }
  EXPECT_LT(ratio(step_home_loads(table, 0)), 1.001);
}

TEST(StressWorkload, W7IsBalancedExceptInEveryFourthMicroStep) {
  const LoadTable& table = load_of(StressWorkload::kBursts);
  std::set<std::vector<std::int64_t>> bursts;
  for (int m = 0; m < 64; ++m) {
    const auto loads = expert_loads(table, m, 0);
    if (m % 4 != 1) {
      EXPECT_LT(ratio(loads), 1.01) << m;
    } else {
      EXPECT_GT(largest(loads), sum(loads) / 64) << m;
      bursts.insert(loads);
    }
  }
  EXPECT_EQ(bursts.size(), 16);  // each burst has different experts
}

TEST(StressWorkload, ATraceHasExactlyTheLoad) {
  SynthesisOptions options = kOptions;
  options.num_micro_steps = 2;
  options.num_ranks = 8;
  options.num_experts = 32;
  for (int i = 0; i < kNumStressWorkloads; ++i) {
    const auto workload = static_cast<StressWorkload>(i);
    EXPECT_EQ(counted(synthesize_trace(options, workload), 2).load, synthesize_load(options, workload).load)
        << name_of(workload);
  }
}

TEST(StressWorkload, DifferOnSmallClustersToo) {
  for (const int ranks : {2, 4, 8}) {
    SynthesisOptions options = kOptions;
    options.num_micro_steps = 8;
    options.num_ranks = ranks;
    options.num_experts = 16 * ranks;
    options.top_k = 2;
    for (int i = 0; i < kNumStressWorkloads; ++i) {
      for (int j = 0; j < i; ++j) {
        EXPECT_NE(synthesize_load(options, static_cast<StressWorkload>(i)).load,
                  synthesize_load(options, static_cast<StressWorkload>(j)).load)
            << ranks << " ranks, w" << i << ", w" << j;
      }
    }
  }
}

}  // namespace foremoe::testing
