#include "foremoe/policy/next_window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>

namespace foremoe {
namespace {

// Skewed tokens: [window][1 layer][expert].
Array<double, 3> draw(std::mt19937& random, std::size_t num_windows, int num_experts) {
  Array<double, 3> windows({num_windows, 1, static_cast<std::size_t>(num_experts)});
  for (double& tokens : windows.flat()) tokens = std::floor(1e6 * std::pow(random() / 4294967296.0, 3));
  return windows;
}

Array<double, 3> sum_of(const Array<double, 3>& windows) {
  Array<double, 3> sum({1, 1, windows.extent(2)});
  for (std::size_t i = 0; i < windows.size(); ++i) sum.flat()[i % sum.size()] += windows.flat()[i];
  return sum;
}

EplbPlacement eplb(const Array<double, 3>& windows, const EplbShape& shape) {
  Array<std::int64_t, 2> weight({1, windows.extent(2)});
  std::ranges::copy(sum_of(windows).flat(), weight.flat().begin());
  return eplb_rebalance(weight, shape);
}

// Tokens of the busiest rank if replicas serve equal parts; `expert_of_slot` lies rank by rank.
double busiest(std::span<const double> tokens, std::span<const int> expert_of_slot, int num_ranks) {
  std::vector<double> part(tokens.begin(), tokens.end());
  for (std::size_t e = 0; e < part.size(); ++e) {
    part[e] /= static_cast<double>(std::ranges::count(expert_of_slot, static_cast<int>(e)));
  }
  std::vector<double> served(num_ranks);
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    served[s * num_ranks / expert_of_slot.size()] += part[expert_of_slot[s]];
  }
  return std::ranges::max(served);
}

std::vector<int> slots_of(const EplbPlacement& placement) {
  std::vector<int> slots;
  for (const ExpertId e : placement.slot_expert.flat()) slots.push_back(e.value);
  return slots;
}

// Smallest busiest rank of all placements with the same number of replicas of each expert.
double optimum(std::span<const double> tokens, std::vector<int> expert_of_slot, int num_ranks) {
  std::ranges::sort(expert_of_slot);
  double least = busiest(tokens, expert_of_slot, num_ranks);
  while (std::ranges::next_permutation(expert_of_slot).found) {
    least = std::min(least, busiest(tokens, expert_of_slot, num_ranks));
  }
  return least;
}

TEST(NextWindow, LiesBetweenTheOptimumAndEplbInTheWindowThatItKnows) {
  std::mt19937 random(1);
  const EplbShape shape{.num_experts = 6, .num_replicas = 9, .num_ranks = 3};
  int num_optimal = 0;
  int num_optimal_of_eplb = 0;
  for (int i = 0; i < 20; ++i) {
    const Array<double, 3> window = draw(random, 1, 6);
    const auto tokens = window.flat();
    const std::vector<int> ours = slots_of(place_for_next_window(window, shape));
    const double of_eplb = busiest(tokens, slots_of(eplb(window, shape)), 3);
    const double best = optimum(tokens, ours, 3);
    const double of_ours = busiest(tokens, ours, 3);
    EXPECT_LE(of_ours, of_eplb * 1.001);
    EXPECT_GE(of_ours, best * (1 - 1e-12));
    num_optimal += static_cast<int>(of_ours <= best * 1.03);
    num_optimal_of_eplb += static_cast<int>(of_eplb <= best * 1.03);
  }
  EXPECT_GE(num_optimal, 16);
  EXPECT_GT(num_optimal, num_optimal_of_eplb);
}

TEST(NextWindow, IsAtMostAThousandthWorseThanEplbInTheWindowThatItKnows) {
  std::mt19937 random(2);
  for (const int num_ranks : {1, 2, 8, 16}) {
    const EplbShape shape{.num_experts = 32, .num_replicas = 32 + 2 * num_ranks, .num_ranks = num_ranks};
    for (int i = 0; i < 20; ++i) {
      const Array<double, 3> window = draw(random, 1, 32);
      EXPECT_LE(busiest(window.flat(), slots_of(place_for_next_window(window, shape)), num_ranks),
                busiest(window.flat(), slots_of(eplb(window, shape)), num_ranks) * 1.001);
    }
  }
}

TEST(NextWindow, PlacesEveryExpertAndKeepsGroupsOnANode) {
  std::mt19937 random(3);
  const EplbShape shape{.num_experts = 16, .num_replicas = 24, .num_ranks = 4, .num_nodes = 2, .num_groups = 4};
  for (const bool distinct : {false, true}) {
    for (int i = 0; i < 20; ++i) {
      const EplbPlacement placement = place_for_next_window(draw(random, 1 + i % 3, 16), shape, distinct);
      const std::vector<int> slots = slots_of(placement);
      ASSERT_EQ(slots.size(), 24U);
      for (int e = 0; e < 16; ++e) {
        EXPECT_EQ(std::ranges::count(slots, e), placement.num_replicas(0, e));
        EXPECT_GE(placement.num_replicas(0, e), 1);
      }
      std::vector<std::set<std::size_t>> nodes_of_group(4);
      for (std::size_t s = 0; s < slots.size(); ++s) nodes_of_group[slots[s] / 4].insert(s / 12);
      for (const auto& nodes : nodes_of_group) EXPECT_EQ(nodes.size(), 1U);
    }
  }
}

int num_repeated(const EplbPlacement& placement) {
  std::size_t count = 0;
  for (std::size_t r = 0; r < placement.slot_expert.extent(1); ++r) {
    const auto row = placement.slot_expert.row(0, r);
    count += row.size() - std::set<ExpertId>(row.begin(), row.end()).size();
  }
  return static_cast<int>(count);
}

TEST(NextWindow, SeparatesReplicasOfAnExpertIfAsked) {
  std::mt19937 random(4);
  int num_together = 0;
  for (int ranks = 2; ranks <= 16; ranks *= 2) {
    for (int replicas = 16; replicas <= 16 * ranks; replicas += ranks) {
      const EplbShape shape{.num_experts = 16, .num_replicas = replicas, .num_ranks = ranks};
      Array<double, 3> windows = draw(random, 2, 16);
      if (replicas % 3 == 0) std::ranges::fill(windows.flat().begin() + 1, windows.flat().end(), 0);
      num_together += num_repeated(eplb(windows, shape));
      const EplbPlacement placement = place_for_next_window(windows, shape, /*distinct=*/true);
      ASSERT_EQ(num_repeated(placement), 0) << ranks << " ranks, " << replicas << " replicas";
      const std::vector<int> slots = slots_of(placement);
      for (int e = 0; e < 16; ++e) ASSERT_EQ(std::ranges::count(slots, e), placement.num_replicas(0, e));
    }
  }
  EXPECT_GT(num_together, 0);
}

// Least busiest rank of all placements of six experts in three ranks of three slots without duplicates.
double least_without_duplicates(std::span<const double> tokens) {
  std::vector<std::vector<int>> sets;
  for (int a = 0; a < 6; ++a) {
    for (int b = a + 1; b < 6; ++b) {
      for (int c = b + 1; c < 6; ++c) sets.push_back({a, b, c});
    }
  }
  double least = std::numeric_limits<double>::infinity();
  for (const auto& x : sets) {
    for (const auto& y : sets) {
      for (const auto& z : sets) {
        std::vector<int> slots(x);
        slots.insert(slots.end(), y.begin(), y.end());
        slots.insert(slots.end(), z.begin(), z.end());
        if (std::set(slots.begin(), slots.end()).size() == 6) least = std::min(least, busiest(tokens, slots, 3));
      }
    }
  }
  return least;
}

TEST(NextWindow, SeparatesReplicasOfAnExpertWhereverThatIsAsGood) {
  std::mt19937 random(9);
  const EplbShape shape{.num_experts = 6, .num_replicas = 9, .num_ranks = 3};
  int num_together_in_eplb = 0;
  int num_separable = 0;
  int num_together = 0;
  for (int i = 0; i < 100; ++i) {
    const Array<double, 3> window = draw(random, 1, 6);
    const EplbPlacement reference = eplb(window, shape);
    const EplbPlacement ours = place_for_next_window(window, shape);
    const double most = 1.001 * busiest(window.flat(), slots_of(reference), 3);
    EXPECT_LE(busiest(window.flat(), slots_of(ours), 3), most);
    num_together_in_eplb += static_cast<int>(num_repeated(reference) > 0);
    if (num_repeated(ours) == 0) continue;
    ++num_together;
    num_separable +=
        static_cast<int>(least_without_duplicates(window.flat()) <= busiest(window.flat(), slots_of(ours), 3));
  }
  EXPECT_GE(num_together_in_eplb, 40);
  EXPECT_LE(num_together, 20);
  EXPECT_LE(num_separable, 4) << "the search is a heuristic";
}

// Each node has four of eight experts, and six slots per rank.
TEST(NextWindow, RepeatsAnExpertIfARankHasMoreSlotsThanItsNodeHasExperts) {
  std::mt19937 random(8);
  const EplbShape shape{.num_experts = 8, .num_replicas = 24, .num_ranks = 4, .num_nodes = 2, .num_groups = 2};
  EXPECT_GE(num_repeated(place_for_next_window(draw(random, 1, 8), shape, /*distinct=*/true)), 4 * 2);
}

TEST(NextWindow, DoesNotDependOnTheUnitOfTokens) {
  std::mt19937 random(5);
  const EplbShape shape{.num_experts = 16, .num_replicas = 24, .num_ranks = 8};
  for (const std::size_t num_windows : {1, 4}) {
    Array<double, 3> windows = draw(random, num_windows, 16);
    const std::vector<int> slots = slots_of(place_for_next_window(windows, shape));
    for (double& tokens : windows.flat()) tokens = std::ldexp(tokens, -45);
    EXPECT_EQ(slots_of(place_for_next_window(windows, shape)), slots);
  }
}

TEST(NextWindow, TreatsEqualWindowsAsOneAndIgnoresEmptyOnes) {
  std::mt19937 random(6);
  const EplbShape shape{.num_experts = 12, .num_replicas = 16, .num_ranks = 4};
  const Array<double, 3> window = draw(random, 1, 12);
  Array<double, 3> with_empty({2, 1, 12});
  std::ranges::copy(window.flat(), with_empty.flat().begin());
  EXPECT_EQ(slots_of(place_for_next_window(with_empty, shape)), slots_of(place_for_next_window(window, shape)));
  const EplbPlacement of_nothing = place_for_next_window(Array<double, 3>({1, 1, 12}), shape);
  EXPECT_EQ(num_repeated(of_nothing), 0);
}

// In each of four windows another expert has most tokens, so the differences between experts may be due to chance.
TEST(NextWindow, GivesEqualNumbersOfReplicasIfWindowsDisagree) {
  Array<double, 3> windows({4, 1, 8}, 10);
  for (std::size_t m = 0; m < 4; ++m) windows(m, 0, m) = 60;
  const EplbShape shape{.num_experts = 8, .num_replicas = 16, .num_ranks = 8};
  EXPECT_THAT(place_for_next_window(windows, shape).num_replicas.flat(), testing::Each(2));
  EXPECT_THAT(place_for_next_window(sum_of(windows), shape).num_replicas.flat(),
              testing::ElementsAre(3, 3, 3, 3, 1, 1, 1, 1));
}

}  // namespace
}  // namespace foremoe
