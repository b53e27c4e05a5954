// Tests the examples of FineMoE's appendix B, and properties of every shape.

#include "foremoe/policy/systems/finemoe/symmetric_placement.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <set>

#include "foremoe/testing/finemoe_instances.h"

namespace foremoe::finemoe {
namespace {

using Edges = std::map<std::pair<int, int>, int>;  // (lower rank, higher rank) → number of experts on both

Edges edges_of(const SymmetricShape& shape) {
  Edges edges;
  for (const auto& ranks : test::holders_of(symmetric_placement(shape))) ++edges[std::minmax(ranks[0], ranks[1])];
  return edges;
}

// Returns [i]: the largest number of edges inside any set of i ranks.
std::vector<int> most_edges_inside(const Edges& edges, int num_ranks) {
  std::vector<int> most(num_ranks + 1);
  for (unsigned set = 0; set < 1U << num_ranks; ++set) {
    int inside = 0;
    for (const auto& [ends, count] : edges) {
      if ((set >> ends.first & 1) != 0 && (set >> ends.second & 1) != 0) inside += count;
    }
    int& of_size = most[std::popcount(set)];
    of_size = std::max(of_size, inside);
  }
  return most;
}

TEST(SymmetricPlacement, IsACycleOfEightRanksWithEightExperts) {
  Edges cycle;
  for (int r = 0; r < 8; ++r) cycle[std::minmax(r, (r + 1) % 8)] = 1;
  EXPECT_EQ(edges_of({.num_ranks = 8, .homes_per_rank = 1}), cycle);
}

TEST(SymmetricPlacement, IsAToroidalGridOfSixteenRanksWithThirtyTwoExperts) {
  Edges torus;
  for (int x = 0; x < 4; ++x) {
    for (int y = 0; y < 4; ++y) {
      ++torus[std::minmax(4 * x + y, 4 * x + (y + 1) % 4)];
      ++torus[std::minmax(4 * x + y, 4 * ((x + 1) % 4) + y)];
    }
  }
  EXPECT_EQ(edges_of({.num_ranks = 16, .homes_per_rank = 2}), torus);
}

TEST(SymmetricPlacement, IsCompleteBipartiteOfEightRanksWithSixteenExperts) {
  Edges bipartite;
  for (int even = 0; even < 8; even += 2) {
    for (int odd = 1; odd < 8; odd += 2) bipartite[std::minmax(even, odd)] = 1;
  }
  const Edges edges = edges_of({.num_ranks = 8, .homes_per_rank = 2});
  EXPECT_EQ(edges, bipartite);
  // "the maximum edge counts among all induced subgraphs with exactly i vertices is minimal": random ones are no better
  const std::vector<int> ours = most_edges_inside(edges, 8);
  EXPECT_THAT(ours, testing::ElementsAre(0, 0, 1, 2, 4, 6, 9, 12, 16));
  Random random(1);
  for (int n = 0; n < 200; ++n) {
    Edges other;
    for (const auto& ranks : test::holders_of(random_placement({.num_ranks = 8, .homes_per_rank = 2}, random))) {
      ++other[std::minmax(ranks[0], ranks[1])];
    }
    const std::vector<int> theirs = most_edges_inside(other, 8);
    for (int i = 0; i <= 8; ++i) EXPECT_LE(ours[i], theirs[i]);
  }
}

TEST(SymmetricPlacement, IsACompleteGraphAndFourMoreEdgesOfEightRanksWithThirtyTwoExperts) {
  Edges complete;
  for (int a = 0; a < 8; ++a) {
    for (int b = a + 1; b < 8; ++b) complete[{a, b}] = a % 2 == 0 && b == a + 1 ? 2 : 1;
  }
  EXPECT_EQ(edges_of({.num_ranks = 8, .homes_per_rank = 4}), complete);
}

TEST(SymmetricPlacement, RepeatsTheCompleteGraphAndAddsTheGraphOfTheRest) {
  // 128 experts on 8 ranks have degree 32: four complete graphs of degree 7, and K4,4 with degree 4.
  const Edges rest = edges_of({.num_ranks = 8, .homes_per_rank = 2});
  for (const auto& [ends, count] : edges_of({.num_ranks = 8, .homes_per_rank = 16})) {
    EXPECT_EQ(count, 4 + (rest.contains(ends) ? 1 : 0));
  }
}

TEST(SymmetricPlacement, GivesEveryRankEquallyManyReplicasForAllPowersOfTwo) {
  for (int ranks = 2; ranks <= 64; ranks *= 2) {
    for (int homes = 1; homes <= 32; homes *= 2) {
      for (const int replicas : {2, 3, 4}) {
        if (replicas > ranks) continue;
        SCOPED_TRACE(fmt::format("{} ranks, {} homes, {} replicas", ranks, homes, replicas));
        const Array<RankId, 3> placement =
            symmetric_placement({.num_ranks = ranks, .homes_per_rank = homes, .replicas = replicas});
        std::vector<int> held(ranks);
        for (int r = 0; r < ranks; ++r) {
          for (int j = 0; j < homes; ++j) {
            const auto at = placement.row(r, j);
            EXPECT_EQ(at[0], RankId{r});
            EXPECT_EQ(std::set(at.begin(), at.end()).size(), at.size());
            for (const RankId rank : at) ++held[rank.index()];
          }
        }
        EXPECT_THAT(held, testing::Each(homes * replicas));
      }
    }
  }
}

// Ranks not a power of two. Complete graphs: two for 6 ranks with 5 homes, one for 7 with 3 and for 12 with 9.
TEST(SymmetricPlacement, ConnectsAllPairsOfRanksIfTheCompleteGraphFits) {
  for (const auto& [ranks, homes, copies] : {std::tuple{6, 5, 2}, {7, 3, 1}, {5, 4, 2}, {12, 9, 1}, {2, 3, 6}}) {
    const Edges edges = edges_of({.num_ranks = ranks, .homes_per_rank = homes});
    EXPECT_EQ(std::ssize(edges), ranks * (ranks - 1) / 2);
    for (const auto& [ends, count] : edges) EXPECT_GE(count, copies);
  }
}

TEST(SymmetricPlacement, ReportsTheGuestSlotsThatItNeeds) {
  EXPECT_EQ(symmetric_shape_error(8, 4, 4), std::nullopt);
  EXPECT_EQ(symmetric_shape_error(8, 4, 28), std::nullopt);
  EXPECT_THAT(*symmetric_shape_error(8, 4, 0), testing::HasSubstr("d ≥ 2: 4, not 0"));
  EXPECT_THAT(*symmetric_shape_error(8, 4, 11), testing::HasSubstr("d ≥ 2: 8, not 11"));
  EXPECT_THAT(*symmetric_shape_error(8, 4, 32), testing::HasSubstr("9 replicas"));
  EXPECT_THAT(*symmetric_shape_error(1, 5, 5), testing::HasSubstr("2 replicas"));
}

// §7.3: random placement is "slightly worse" than symmetric.
TEST(SymmetricPlacement, PermitsLowerRankLoadsThanRandomPlacementOnAverage) {
  Random random(1);
  for (const auto& [ranks, homes] : {std::pair{8, 1}, {8, 2}, {8, 4}, {16, 2}}) {
    const SymmetricShape shape{.num_ranks = ranks, .homes_per_rank = homes};
    const auto symmetric = test::holders_of(symmetric_placement(shape));
    double of_symmetric = 0;
    double of_random = 0;
    for (int n = 0; n < 60; ++n) {
      const auto load = test::zipf_load(symmetric.size(), 0.8, 100'000, random);
      of_symmetric += static_cast<double>(test::densest_set(symmetric, load, ranks));
      of_random +=
          static_cast<double>(test::densest_set(test::holders_of(random_placement(shape, random)), load, ranks));
      if (ranks == 16 && n == 9) break;  // each has 2^16 sets
    }
    EXPECT_LT(of_symmetric, of_random) << ranks << " ranks, " << homes << " homes";
  }
}

TEST(RandomPlacement, GivesEveryRankEquallyManyDistinctReplicas) {
  Random random(1);
  for (const auto& [ranks, homes, replicas] :
       {std::tuple{2, 1, 2}, {3, 1, 3}, {3, 2, 2}, {6, 2, 5}, {8, 16, 2}, {8, 4, 8}, {64, 2, 3}}) {
    for (int n = 0; n < 20; ++n) {
      std::vector<int> held(ranks);
      for (const auto& at : test::holders_of(
               random_placement({.num_ranks = ranks, .homes_per_rank = homes, .replicas = replicas}, random))) {
        EXPECT_EQ(std::set(at.begin(), at.end()).size(), at.size());
        for (const int r : at) ++held[r];
      }
      EXPECT_THAT(held, testing::Each(homes * replicas));
    }
  }
}

TEST(RandomPlacement, DiffersBetweenDraws) {
  Random random(1);
  const SymmetricShape shape{.num_ranks = 8, .homes_per_rank = 4};
  EXPECT_NE(random_placement(shape, random), random_placement(shape, random));
}

}  // namespace
}  // namespace foremoe::finemoe
