#include "foremoe/plan/token_choice.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>
#include <tuple>

#include "foremoe/core/random.h"

namespace foremoe {
namespace {

struct Case {
  int experts = 0;
  int top_k = 0;
  ExpertGroups groups;
};

using Set = unsigned;  // a set of experts, one bit each

bool holds(Set set, std::size_t expert) { return (set >> expert & 1U) != 0; }

// All sets that a token may choose.
std::vector<Set> sets_of(const Case& c) {
  std::vector<Set> sets;
  const int size = c.experts / c.groups.count;
  for (Set set = 0; set < 1U << c.experts; ++set) {
    int groups = 0;
    for (int g = 0; g < c.groups.count; ++g) groups += (set >> (g * size) & ((1U << size) - 1)) != 0 ? 1 : 0;
    if (std::popcount(set) == c.top_k && groups <= c.groups.per_token) sets.push_back(set);
  }
  return sets;
}

// The maximum-entropy distribution with these frequencies, computed by iterative proportional fitting.
std::vector<double> largest_entropy(const std::vector<Set>& sets, std::span<const double> frequency) {
  std::vector<double> p(sets.size(), 1.0 / static_cast<double>(sets.size()));
  for (int sweep = 0; sweep < 3000; ++sweep) {
    for (std::size_t e = 0; e < frequency.size(); ++e) {
      double with = 0;
      for (std::size_t i = 0; i < sets.size(); ++i) with += holds(sets[i], e) ? p[i] : 0;
      for (std::size_t i = 0; i < sets.size(); ++i) {
        p[i] *= holds(sets[i], e) ? frequency[e] / with : (1 - frequency[e]) / (1 - with);
      }
    }
  }
  return p;
}

// Counts of each expert if tokens choose each set with a random frequency, from almost never to almost always.
std::vector<Tokens> draw_counts(const std::vector<Set>& sets, const Case& c, Random& random) {
  std::vector<Tokens> counts(static_cast<std::size_t>(c.experts));
  for (const Set set : sets) {
    const auto tokens = static_cast<std::int64_t>(1 + 1e5 * std::pow(random.uniform(), 8));
    for (std::size_t e = 0; e < counts.size(); ++e) counts[e] += Tokens{holds(set, e) ? tokens : 0};
  }
  return counts;
}

class TokenChoiceTest : public testing::TestWithParam<Case> {};

TEST_P(TokenChoiceTest, MatchesTheMaximumEntropyDistribution) {
  const Case& c = GetParam();
  Random random(7);
  const std::vector<Set> sets = sets_of(c);
  TokenChoice choice;
  for (int trial = 0; trial < 20; ++trial) {
    const std::vector<Tokens> counts = draw_counts(sets, c, random);
    choice.fit(counts, c.top_k, c.groups);
    std::vector<double> frequency;
    for (const Tokens count : counts) frequency.push_back(static_cast<double>(count.value) / choice.tokens());
    const std::vector<double> p = largest_entropy(sets, frequency);

    constexpr std::size_t kPlaces = 3;
    std::vector<std::size_t> place;
    for (int e = 0; e < c.experts; ++e) place.push_back(random.below(kPlaces));
    std::vector<double> missed(kPlaces);
    choice.misses(place, missed);
    for (std::size_t at = 0; at < kPlaces; ++at) {
      double expected = 0;
      for (std::size_t i = 0; i < sets.size(); ++i) {
        bool visits = false;
        for (std::size_t e = 0; e < place.size(); ++e) visits = visits || (place[e] == at && holds(sets[i], e));
        expected += visits ? 0 : p[i];
      }
      const double near = c.groups.per_token < c.groups.count ? 0.01 : 0.003;  // groups converge more slowly
      EXPECT_NEAR(missed[at], expected, near) << "place " << at << ", trial " << trial;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, TokenChoiceTest,
                         testing::Values(Case{.experts = 6, .top_k = 2}, Case{.experts = 8, .top_k = 3},
                                         Case{.experts = 8, .top_k = 7}, Case{.experts = 5, .top_k = 1},
                                         Case{.experts = 8, .top_k = 3, .groups = {.count = 4, .per_token = 2}},
                                         Case{.experts = 9, .top_k = 4, .groups = {.count = 3, .per_token = 2}},
                                         Case{.experts = 8, .top_k = 2, .groups = {.count = 4, .per_token = 1}},
                                         Case{.experts = 8, .top_k = 4, .groups = {.count = 2, .per_token = 1}},
                                         Case{.experts = 12, .top_k = 4, .groups = {.count = 4, .per_token = 2}},
                                         Case{.experts = 8, .top_k = 3, .groups = {.count = 2, .per_token = 2}}));

double ways(int n, int k) { return std::exp(std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1)); }

TEST(TokenChoice, MatchesDrawingWithoutReplacementForEqualExperts) {
  TokenChoice choice;
  const std::vector<Tokens> counts(128, Tokens{64});
  choice.fit(counts, 8, {});
  EXPECT_DOUBLE_EQ(choice.tokens(), 1024);
  std::vector<std::size_t> place(128);
  for (std::size_t e = 0; e < place.size(); ++e) place[e] = e / 16;
  std::vector<double> missed(8);
  choice.misses(place, missed);
  for (const double p : missed) EXPECT_NEAR(p, ways(112, 8) / ways(128, 8), 1e-9);
}

TEST(TokenChoice, NeverMissesAnExpertThatEveryTokenChooses) {
  TokenChoice choice;
  std::vector<Tokens> counts(64, Tokens{10});
  counts[5] = Tokens{630};  // top-2: every token chooses it and one other expert
  choice.fit(counts, 2, {});
  EXPECT_DOUBLE_EQ(choice.tokens(), 630);
  std::vector<std::size_t> place(64, 1);
  place[5] = 0;
  std::vector<double> missed(3);
  choice.misses(place, missed);
  EXPECT_NEAR(missed[0], 0, 1e-3);
  EXPECT_NEAR(missed[1], 0, 1e-3);
  EXPECT_EQ(missed[2], 1);  // this place has no experts
}

// Fits the counts. Expects probabilities for each expert alone, and for all even and all odd experts.
void expect_probabilities(const std::vector<Tokens>& counts, int top_k, const ExpertGroups& groups) {
  TokenChoice choice;
  choice.fit(counts, top_k, groups);
  for (const std::size_t num_places : {counts.size(), std::size_t{2}}) {
    std::vector<std::size_t> place(counts.size());
    for (std::size_t e = 0; e < place.size(); ++e) place[e] = e % num_places;
    std::vector<double> missed(num_places);
    choice.misses(place, missed);
    for (const double p : missed) {
      EXPECT_GE(p, 0) << top_k << " of " << counts.size();
      EXPECT_LE(p, 1 + 1e-9) << top_k << " of " << counts.size();
    }
  }
}

TEST(TokenChoice, GivesProbabilitiesForImpossibleCounts) {
  for (const std::int64_t other : {0, 1, 40}) {
    std::vector<Tokens> counts(16);
    counts[3] = Tokens{1000};
    counts[4] = Tokens{other};
    counts[5] = Tokens{other};
    for (const ExpertGroups& groups : {ExpertGroups{}, ExpertGroups{.count = 8, .per_token = 2}}) {
      TokenChoice choice;
      choice.fit(counts, 4, groups);
      EXPECT_EQ(choice.tokens(), 1000);
      expect_probabilities(counts, 4, groups);
    }
  }
}

TEST(TokenChoice, IgnoresGroupsThatTheCountsContradict) {
  const ExpertGroups groups{.count = 8, .per_token = 4};
  std::vector<Tokens> one_of_each_group(256);
  for (std::size_t e = 0; e < 256; e += 32) one_of_each_group[e] = Tokens{20};
  expect_probabilities(one_of_each_group, 8, groups);
  one_of_each_group[1] = Tokens{20};
  expect_probabilities(one_of_each_group, 8, groups);
  TokenChoice with, without;
  with.fit(one_of_each_group, 8, groups);
  without.fit(one_of_each_group, 8, {});
  std::vector<std::size_t> place(256, 1);
  place[0] = 0;
  std::vector<double> missed(2), expected(2);
  with.misses(place, missed);
  without.misses(place, expected);
  EXPECT_EQ(missed, expected);
}

TEST(TokenChoice, GivesProbabilitiesIfTokensChooseManyExperts) {
  std::vector<Tokens> alike(512, Tokens{100});
  std::vector<Tokens> one_for_all(512, Tokens{1});
  one_for_all[7] = Tokens{10'000'000};
  for (const int top_k : {64, 384, 511, 512}) {
    expect_probabilities(alike, top_k, {});
    expect_probabilities(one_for_all, top_k, {});
  }
}

TEST(TokenChoice, FindsTheSameProbabilitiesFromKeptFits) {
  const std::vector<Tokens> counts{Tokens{900}, Tokens{700}, Tokens{500}, Tokens{300}, Tokens{90}, Tokens{10}};
  const std::vector<Tokens> reversed(counts.rbegin(), counts.rend());
  const ExpertGroups two_groups{.count = 2, .per_token = 1};
  const std::vector<std::size_t> place{0, 1, 2, 0, 1, 2};
  FittedChoices fitted;
  for (int again = 0; again < 2; ++again) {
    for (const auto& [of_expert, top_k, groups] :
         {std::tuple{counts, 2, ExpertGroups{}}, {counts, 3, {}}, {counts, 2, two_groups}, {reversed, 2, {}}}) {
      TokenChoice fresh, kept;
      std::vector<double> expected(3), missed(3);
      fresh.fit(of_expert, top_k, groups);
      fresh.misses(place, expected);
      kept.fit(of_expert, top_k, groups, &fitted);
      kept.misses(place, missed);
      EXPECT_EQ(missed, expected) << top_k;
      EXPECT_EQ(kept.tokens(), fresh.tokens());
    }
  }
  EXPECT_EQ(fitted.size(), 4);
}

TEST(TokenChoice, MatchesTheCountsForOneExpertPerToken) {
  TokenChoice choice;
  std::vector<double> missed(4);
  for (const ExpertGroups& groups : {ExpertGroups{}, ExpertGroups{.count = 2, .per_token = 1}}) {
    choice.fit(std::vector{Tokens{900}, Tokens{50}, Tokens{30}, Tokens{20}}, 1, groups);
    choice.misses(std::vector<std::size_t>{0, 1, 2, 3}, missed);
    EXPECT_NEAR(missed[0], 0.1, 1e-5);
    EXPECT_NEAR(missed[1], 0.95, 1e-5);
    EXPECT_NEAR(missed[3], 0.98, 1e-5);
  }
}

}  // namespace
}  // namespace foremoe
