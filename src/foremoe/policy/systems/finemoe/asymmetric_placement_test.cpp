#include "foremoe/policy/systems/finemoe/asymmetric_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "foremoe/testing/finemoe_instances.h"

namespace foremoe::finemoe {
namespace {

using Loads = std::vector<std::int64_t>;
using testing::Each;
using testing::ElementsAre;

TEST(ReplicaCounts, GoToTheExpertWithTheMostTokensPerReplica) {
  // Expert 0 falls to 6 and 4 tokens per replica, expert 1 from 5 to 2.5. Then expert 0 (4) is before expert 2 (3).
  EXPECT_THAT(replica_counts(Loads{12, 5, 3, 1}, {.num_ranks = 4, .slots_per_rank = 2}), ElementsAre(4, 2, 1, 1));
  EXPECT_THAT(replica_counts(Loads{12, 5, 3, 1}, {.num_ranks = 2, .slots_per_rank = 3}), ElementsAre(2, 2, 1, 1));
}

TEST(ReplicaCounts, AreAtMostOnePerRank) {
  EXPECT_THAT(replica_counts(Loads{1000, 1, 1, 1}, {.num_ranks = 2, .slots_per_rank = 4}), Each(2));
  EXPECT_THAT(replica_counts(Loads{7, 0}, {.num_ranks = 1, .slots_per_rank = 9}), Each(1));
  EXPECT_THAT(replica_counts(Loads{5, 0, 0, 0}, {.num_ranks = 3, .slots_per_rank = 2}), ElementsAre(3, 1, 1, 1));
}

TEST(ReplicaCounts, GoToTheLowestIdOnTies) {
  EXPECT_THAT(replica_counts(Loads{4, 4, 4}, {.num_ranks = 2, .slots_per_rank = 2}), ElementsAre(2, 1, 1));
}

// Expects consistent indices (§B.3) and an unchanged total of the counts.
TEST(DrawPlacement, GivesAllReplicasOfAnExpertTheSameLocalIndex) {
  Random random(1);
  for (int n = 0; n < 300; ++n) {
    const AsymmetricShape shape{.num_ranks = 1 + static_cast<int>(random.below(9)),
                                .slots_per_rank = 1 + static_cast<int>(random.below(6))};
    const std::size_t experts = 1 + random.below(static_cast<std::uint64_t>(shape.num_ranks) * shape.slots_per_rank);
    const Loads load = test::zipf_load(experts, 1.5, 1000, random);
    const std::vector<int> counts = replica_counts(load, shape);
    const Array<ExpertId, 2> placement = draw_placement(load, counts, shape, random);
    std::vector<std::set<int>> indices(experts);
    int empty = 0;
    for (int r = 0; r < shape.num_ranks; ++r) {
      for (int i = 0; i < shape.slots_per_rank; ++i) {
        if (placement(r, i) == kNoExpert) {
          ++empty;
        } else {
          indices[placement(r, i).index()].insert(i);
        }
      }
    }
    for (const auto& of_expert : indices) ASSERT_EQ(of_expert.size(), 1);
    ASSERT_EQ(shape.num_ranks * shape.slots_per_rank - empty, std::accumulate(counts.begin(), counts.end(), 0));
    for (const auto& ranks : test::holders_of(placement, experts)) {
      ASSERT_EQ(std::set(ranks.begin(), ranks.end()).size(), ranks.size());
    }
  }
}

TEST(DrawPlacement, KeepsCountsThatFitAndGivesOtherCellsToTheDensestExpert) {
  Random random(1);
  const Loads load{9, 6, 5};
  // Two indices of three ranks hold 2 + 1 and 3 replicas.
  auto count_of = [&](const std::vector<int>& counts) {
    std::vector<std::size_t> held;
    for (const auto& ranks :
         test::holders_of(draw_placement(load, counts, {.num_ranks = 3, .slots_per_rank = 2}, random), load.size())) {
      held.push_back(ranks.size());
    }
    return held;
  };
  EXPECT_THAT(count_of({3, 2, 1}), ElementsAre(3, 2, 1));
  EXPECT_THAT(count_of({2, 2, 2}), testing::Contains(3));  // two get an index each, the third 1 cell; 1 is left
}

TEST(LargestDensity, EqualsEquation3) {
  Random random(2);
  for (int n = 0; n < 300; ++n) {
    const AsymmetricShape shape{.num_ranks = 2 + static_cast<int>(random.below(8)), .slots_per_rank = 3};
    const Loads load = test::zipf_load(2 * shape.num_ranks, 1.2, 500, random);
    const auto placement = draw_placement(load, replica_counts(load, shape), shape, random);
    ASSERT_EQ(largest_density(placement, load),
              test::densest_set(test::holders_of(placement, load.size()), load, shape.num_ranks));
  }
}

TEST(AsymmetricPlacement, IsTheBestOfItsSamples) {
  Random random(3);
  for (int n = 0; n < 20; ++n) {
    const AsymmetricShape shape{.num_ranks = 6, .slots_per_rank = 3};
    const Loads load = test::zipf_load(12, 1.4, 6000, random);
    const std::uint64_t seed = random.bits();
    Random for_all(seed);
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (int sample = 0; sample < 25; ++sample) {
      least = std::min(least, largest_density(draw_placement(load, replica_counts(load, shape), shape, for_all), load));
    }
    Random again(seed);
    EXPECT_EQ(largest_density(asymmetric_placement(load, shape, again, 25), load), least);
  }
}

// §7.3, figure 8: "FineMoE with asymmetric placements can always achieve complete load balance".
TEST(AsymmetricPlacement, BalancesEverySkewOfEightRanksWithThirtyTwoExperts) {
  Random random(4);
  for (double s = 0; s <= 2.01; s += 0.2) {
    for (int n = 0; n < 10; ++n) {
      const Loads load = test::zipf_load(32, s, 262'144, random);
      const auto placement = asymmetric_placement(load, {.num_ranks = 8, .slots_per_rank = 8}, random);
      EXPECT_LE(static_cast<double>(largest_density(placement, load)), 1.005 * 262'144 / 8) << "s = " << s;
    }
  }
}

// Four experts on two ranks: homes {0, 1} and {2, 3}, guests 2 and 1.
Array<ExpertId, 2> two_ranks() {
  Array<ExpertId, 2> placement({2, 3});
  const int experts[] = {0, 1, 2, 2, 3, 1};
  for (int i = 0; i < 6; ++i) placement.flat()[i] = ExpertId{experts[i]};
  return placement;
}

TEST(AdaptiveReplacement, ReplacesOnlyIfThePlacementExceedsTheThreshold) {
  EXPECT_FALSE(needs_replacement(two_ranks(), Loads{10, 5, 5, 10}, 1.0));
  EXPECT_TRUE(needs_replacement(two_ranks(), Loads{30, 0, 0, 10}, 1.4));
  EXPECT_FALSE(needs_replacement(two_ranks(), Loads{30, 0, 0, 10}, 1.5));
  EXPECT_FALSE(needs_replacement(two_ranks(), Loads{0, 0, 0, 0}, 1.0));
}

Array<std::int64_t, 2> loads_of(const std::vector<Loads>& rows) {
  Array<std::int64_t, 2> load({rows.size(), rows.front().size()});
  for (std::size_t m = 0; m < rows.size(); ++m) std::ranges::copy(rows[m], load.row(m).begin());
  return load;
}

class Replacing : public testing::Test {
 protected:
  bool same(const Array<ExpertId, 3>& placements, int a, int b) {
    return std::ranges::equal(placements.view()[a].flat(), placements.view()[b].flat());
  }
  Array<ExpertId, 3> replace(const std::vector<Loads>& rows, const Loads& predicted, bool placed,
                             const ReplacementOptions& options) {
    Random random(1);
    const auto load = loads_of(rows);
    const auto initial = two_ranks();
    return replace_adaptively({.load = load,
                               .predicted_load = predicted,
                               .initial = placed ? initial.view() : ArrayView<const ExpertId, 2>{},
                               .shape = {.num_ranks = 2, .slots_per_rank = 3}},
                              options, random);
  }
  const Loads even{10, 5, 5, 10};
  const Loads skewed{30, 0, 0, 10};  // calls for expert 0 on both ranks
};

TEST_F(Replacing, KeepsAPlacementThatIsGoodEnough) {
  const auto placements = replace({even, even, skewed, skewed}, even, true, {.interval = 9, .window = 9});
  EXPECT_TRUE(std::ranges::equal(placements.view()[0].flat(), two_ranks().flat()));
  EXPECT_TRUE(same(placements, 0, 3));
}

TEST_F(Replacing, ReplacesBeforeTheFirstMicroStepIfThePredictionRequiresIt) {
  const auto placements = replace({even, even}, skewed, true, {});
  EXPECT_FALSE(std::ranges::equal(placements.view()[0].flat(), two_ranks().flat()));
  EXPECT_FALSE(needs_replacement(placements.view()[0], skewed, 1.0));
}

TEST_F(Replacing, PlacesWithoutAnInitialPlacement) {
  const auto placements = replace({even}, even, false, {});
  EXPECT_FALSE(needs_replacement(placements.view()[0], even, 1.0));
}

TEST_F(Replacing, EvaluatesTheLastWindowEveryInterval) {
  // Micro-step 2 uses the skew of micro-step 1. An average over all past micro-steps would not reach the threshold.
  const auto placements =
      replace({even, skewed, even, even}, even, true, {.threshold = 1.4, .interval = 2, .window = 1});
  EXPECT_TRUE(same(placements, 0, 1));
  EXPECT_FALSE(same(placements, 1, 2));
  EXPECT_TRUE(same(placements, 2, 3));
  const auto averaged = replace({even, skewed, even, even}, even, true, {.threshold = 1.4, .interval = 2, .window = 2});
  EXPECT_TRUE(same(averaged, 0, 3));
}

}  // namespace
}  // namespace foremoe::finemoe
