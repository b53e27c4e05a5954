#include "foremoe/rollout/synthesis/draw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

namespace foremoe {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Le;

// Expects mean and variance within five standard errors. Seeds are fixed, so the test is deterministic.
void expect_binomial(std::int64_t n, double p) {
  Random random(11);
  constexpr int kDraws = 40000;
  double sum = 0;
  double squares = 0;
  const double mean = static_cast<double>(n) * p;
  const double variance = mean * (1 - p);
  for (int i = 0; i < kDraws; ++i) {
    const std::int64_t k = binomial(random, n, p);
    ASSERT_GE(k, 0);
    ASSERT_LE(k, n);
    sum += static_cast<double>(k);
    squares += std::pow(static_cast<double>(k) - mean, 2);
  }
  EXPECT_NEAR(sum / kDraws, mean, 5 * std::sqrt(variance / kDraws)) << "n " << n << " p " << p;
  EXPECT_NEAR(squares / kDraws / variance, 1, 5 * std::sqrt((2 + 1 / variance) / kDraws)) << "n " << n << " p " << p;
}

TEST(Draw, BinomialHasItsMeanAndVarianceOnBothPaths) {
  for (const double p : {0.001, 0.02, 0.3, 0.5, 0.7, 0.99}) {
    for (const std::int64_t n : {5, 40, 1000, 65536}) expect_binomial(n, p);
  }
}

TEST(Draw, BinomialByRejectionHasTheProbabilitiesOfTheBinomial) {
  Random random(3);
  constexpr int kN = 30;
  constexpr int kDraws = 200000;
  std::vector<double> seen(kN + 1);
  for (int i = 0; i < kDraws; ++i) ++seen[static_cast<std::size_t>(binomial(random, kN, 0.4))];
  double probability = std::pow(0.6, kN);
  for (int k = 0; k <= kN; ++k) {
    EXPECT_NEAR(seen[static_cast<std::size_t>(k)] / kDraws, probability, 5 * std::sqrt(probability / kDraws) + 1e-5)
        << k;
    probability *= 0.4 / 0.6 * (kN - k) / (k + 1);
  }
}

TEST(Draw, BinomialIsExactForProbabilitiesZeroAndOne) {
  Random random(1);
  EXPECT_EQ(binomial(random, 0, 0.5), 0);
  EXPECT_EQ(binomial(random, 9, 0), 0);
  EXPECT_EQ(binomial(random, 9, 1), 9);
}

TEST(Draw, GammaHasItsMeanAndVariance) {
  for (const double shape : {0.1, 0.5, 1.0, 4.0}) {
    Random random(5);
    constexpr int kDraws = 100000;
    double sum = 0;
    double squares = 0;
    for (int i = 0; i < kDraws; ++i) {
      const double x = gamma(random, shape);
      sum += x;
      squares += x * x;
    }
    const double mean = sum / kDraws;
    EXPECT_NEAR(mean / shape, 1, 0.05) << shape;
    EXPECT_NEAR((squares / kDraws - mean * mean) / shape, 1, 0.1) << shape;
  }
}

TEST(Draw, MultinomialKeepsTheSumAndTheLimit) {
  Random random(2);
  const std::vector<double> p{0.5, 0.2, 0.2, 0.1};
  std::vector<std::int64_t> counts(4);
  std::vector<double> sum(4);
  for (int i = 0; i < 2000; ++i) {
    multinomial(random, 200, p, 100, counts);
    ASSERT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), 200);
    ASSERT_THAT(counts, Each(Le(100)));
    for (std::size_t e = 0; e < 4; ++e) sum[e] += static_cast<double>(counts[e]);
  }
  EXPECT_NEAR(sum[2] / 2000, 40, 3);
  multinomial(random, 200, p, 50, counts);
  EXPECT_THAT(counts, ElementsAre(50, 50, 50, 50));
}

TEST(Draw, ApportioningDiffersFromTheSharesByLessThanOne) {
  std::vector<std::int64_t> counts(3);
  apportion(10, std::vector<double>{5.5, 2.5, 2.0}, 10, counts);
  EXPECT_THAT(counts, ElementsAre(6, 2, 2));
  apportion(10, std::vector<double>{10.0 / 3, 10.0 / 3, 10.0 / 3}, 10, counts);
  EXPECT_THAT(counts, ElementsAre(4, 3, 3));
  apportion(3, std::vector<double>{3.0, 0.0, 0.0}, 1, counts);
  EXPECT_THAT(counts, ElementsAre(1, 1, 1));
  apportion(3, std::vector<double>{-0.9, 2.0, 1.9}, 3, counts);
  EXPECT_THAT(counts, ElementsAre(0, 2, 1));
  apportion(3, std::vector<double>{-0.9, 2.0, 2.0}, 3, counts);
  EXPECT_THAT(counts, ElementsAre(0, 2, 1));
}

TEST(Draw, NormalizingClampsToTheLimitAndKeepsTheOrderOfTheRest) {
  std::vector<double> p{100, 50, 2, 1, 1};
  normalize(p, 0.3);
  EXPECT_NEAR(std::accumulate(p.begin(), p.end(), 0.0), 1, 1e-12);
  EXPECT_DOUBLE_EQ(p[0], 0.3);
  EXPECT_DOUBLE_EQ(p[1], 0.3);
  EXPECT_NEAR(p[2], 0.2, 1e-12);
  EXPECT_NEAR(p[3], 0.1, 1e-12);
  std::vector<double> single{1, 0, 0};
  normalize(single, 0.5);
  EXPECT_THAT(single, ElementsAre(0.5, 0.25, 0.25));
}

TEST(Draw, DistinctSamplingMatchesProbabilitiesWithoutRepeats) {
  std::vector<double> p{40, 20, 10, 5, 5, 1, 1, 0};
  normalize(p, 1.0 / 3);
  Random random(9);
  DistinctSampler sampler(p, 3, random);
  std::vector<std::int64_t> row(3);
  std::vector<double> chosen(p.size());
  constexpr int kRows = 60000;
  for (int i = 0; i < kRows; ++i) {
    sampler.draw(row);
    ASSERT_EQ(std::set(row.begin(), row.end()).size(), 3);
    for (const std::int64_t e : row) ++chosen[static_cast<std::size_t>(e)];
  }
  for (std::size_t e = 0; e < p.size(); ++e) EXPECT_NEAR(chosen[e] / kRows, 3 * p[e], 0.02) << e;
  EXPECT_EQ(chosen[0], kRows);  // at the limit: chosen in every row
  EXPECT_EQ(chosen[7], 0);
}

TEST(Draw, DistinctSamplingOfAllCategoriesTakesAll) {
  const std::vector<double> p(4, 0.25);
  Random random(9);
  DistinctSampler sampler(p, 4, random);
  std::vector<std::int64_t> row(4);
  for (int i = 0; i < 100; ++i) {
    sampler.draw(row);
    EXPECT_EQ(std::set(row.begin(), row.end()).size(), 4);
  }
}

TEST(Draw, GroupedSamplingOfOneMatchesProbabilities) {
  const std::vector<double> p{0.4, 0, 0.25, 0.05, 0.2, 0.1};
  Random random(5);
  GroupedSampler sampler(p, 1, {.count = 3, .per_token = 1}, random);
  std::vector<std::int64_t> row(1);
  std::vector<double> chosen(p.size());
  constexpr int kRows = 60000;
  for (int i = 0; i < kRows; ++i) {
    sampler.draw(row);
    ++chosen[static_cast<std::size_t>(row[0])];
  }
  for (std::size_t e = 0; e < p.size(); ++e) EXPECT_NEAR(chosen[e] / kRows, p[e], 0.01) << e;
}

// Chooses three of nine experts from two of three groups: those with the largest sums of their two best scores.
std::set<std::size_t> select_by_definition(const std::vector<double>& p, Random& random) {
  std::vector<double> score;
  for (const double x : p) score.push_back(std::log(x) - std::log(-std::log(1 - random.uniform())));
  std::vector<double> sum;
  for (std::size_t g = 0; g < 9; g += 3) {
    sum.push_back(score[g] + score[g + 1] + score[g + 2] - std::min({score[g], score[g + 1], score[g + 2]}));
  }
  const auto worst = static_cast<std::size_t>(std::min_element(sum.begin(), sum.end()) - sum.begin());
  std::vector<std::size_t> experts;
  for (std::size_t e = 0; e < 9; ++e) {
    if (e / 3 != worst) experts.push_back(e);
  }
  std::sort(experts.begin(), experts.end(), [&](std::size_t a, std::size_t b) { return score[a] > score[b]; });
  return {experts.begin(), experts.begin() + 3};
}

TEST(Draw, GroupsAreSelectedByTheirBestScores) {
  const std::vector<double> p{0.3, 0.05, 0.01, 0.1, 0.1, 0.1, 0.02, 0.02, 0.3};
  Random random(7), other(8);
  GroupedSampler sampler(p, 3, {.count = 3, .per_token = 2}, random);
  std::vector<std::int64_t> row(3);
  std::map<std::set<std::size_t>, double> drawn, expected;
  constexpr int kRows = 100000;
  for (int i = 0; i < kRows; ++i) {
    sampler.draw(row);
    drawn[{row.begin(), row.end()}] += 1.0 / kRows;
    expected[select_by_definition(p, other)] += 1.0 / kRows;
  }
  double distance = 0;
  for (const auto& [experts, share] : expected) distance += std::abs(share - drawn[experts]);
  for (const auto& [experts, share] : drawn) distance += expected.contains(experts) ? 0 : share;
  EXPECT_LT(distance, 0.05);
}

TEST(Draw, StreamsWithDifferentNamesDiffer) {
  std::set<std::uint64_t> first;
  for (std::uint64_t a = 0; a < 10; ++a) {
    for (std::uint64_t b = 0; b < 10; ++b) first.insert(stream_of(1, Purpose::kTopic, a, b).bits());
  }
  first.insert(stream_of(2, Purpose::kTopic).bits());
  first.insert(stream_of(1, Purpose::kBase).bits());
  EXPECT_EQ(first.size(), 102);
}

}  // namespace foremoe
