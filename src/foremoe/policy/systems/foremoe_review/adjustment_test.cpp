#include "foremoe/policy/systems/foremoe_review/adjustment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "foremoe/core/random.h"

namespace foremoe::review {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

using Loads = std::vector<std::int64_t>;

BasePlacement hosted(std::vector<int> host) {
  std::vector<int> replica(host.size(), -1);
  return {.host = std::move(host), .replica = std::move(replica)};
}

std::vector<std::int64_t> rank_loads(const std::vector<std::vector<Part>>& parts, int num_ranks) {
  std::vector<std::int64_t> load(num_ranks);
  for (const auto& of_expert : parts) {
    for (const Part& part : of_expert) load[part.rank] += part.tokens;
  }
  return load;
}

const BasePlacement kPairs = hosted({0, 0, 1, 1, 2, 2});
constexpr BaseShape kThreeRanks{.num_ranks = 3, .slots_per_rank = 3};

// 9 + 3 | 3 + 2 | 1 + 0, ideal 6, band 5.4 to 6.6. Pairs are (0, 2), then (0, 1). In round 1, expert 0 moves to rank 2,
// as 9 ≤ 1.5 · (12 − 6). Loads 3 | 5 | 10: rank 0 is no longer above the band. In round 2, rank 2's own expert 4 moves
// to rank 0, as 1 ≤ 1.5 · 4. Loads 4 | 5 | 9. Round 3 has no candidate.
TEST(Adjust, MovesTheLargestExpertBetweenTheWidestPairWhileItHelps) {
  const Loads load = {9, 3, 3, 2, 1, 0};
  EXPECT_THAT(adjust(kPairs, load, kThreeRanks, {.rounds = 1}), ElementsAre(Move{0, 0, 2}));
  const std::vector<Move> moves = adjust(kPairs, load, kThreeRanks, {});
  EXPECT_THAT(moves, ElementsAre(Move{0, 0, 2}, Move{4, 2, 0}));
  EXPECT_THAT(rank_loads(adjusted_parts(kPairs, moves, load), 3), ElementsAre(4, 5, 9));
}

TEST(Adjust, MovesNothingInsideTheBand) {
  EXPECT_THAT(adjust(kPairs, Loads{3, 3, 3, 3, 3, 3}, kThreeRanks, {}), IsEmpty());
  EXPECT_THAT(adjust(kPairs, Loads{9, 3, 3, 2, 1, 0}, kThreeRanks, {.epsilon = 1.0}), IsEmpty());  // 12 = 2 · 6
}

TEST(Adjust, TriesSmallerExpertsOnlyOnRequestIfTheLargestWouldOvercorrect) {
  const Loads load = {9, 3, 3, 2, 1, 0};  // 9 > 1.4 · 6; expert 1 with 3 tokens would qualify
  EXPECT_THAT(adjust(kPairs, load, kThreeRanks, {.overshoot = 1.4}), IsEmpty());
  EXPECT_THAT(adjust(kPairs, Loads{10, 2, 3, 2, 1, 0}, kThreeRanks, {}), IsEmpty());  // 10 > 1.5 · 6
  // Loads are then 9 | 5 | 4. Rank 0 has only expert 0 left, and 9 > 1.4 · 3.
  EXPECT_THAT(adjust(kPairs, load, kThreeRanks, {.overshoot = 1.4, .try_smaller = true}), ElementsAre(Move{1, 0, 2}));
}

// 9 + 3 | 4 | 4 | 4, ideal 6. Expert 0 may move, as 9 ≤ 1.5 · 6, but 4 + 9 exceeds the largest load, 12.
TEST(Adjust, FallsBackToTheBasePlacementIfMovesDoNotHelp) {
  const BasePlacement base = hosted({0, 0, 1, 1, 2, 2, 3, 3});
  EXPECT_THAT(adjust(base, Loads{9, 3, 4, 0, 4, 0, 4, 0}, {.num_ranks = 4, .slots_per_rank = 3}, {}), IsEmpty());
}

TEST(Adjust, MovesNoExpertToAFullRank) {
  EXPECT_THAT(adjust(kPairs, Loads{9, 3, 3, 2, 1, 0}, {.num_ranks = 3, .slots_per_rank = 2}, {}), IsEmpty());
}

// Expert 0's replica on rank 1 serves 4 of its 9 tokens: 5 + 7 | 4 | 2, ideal 6. Expert 1 has the largest part on rank
// 0. It moves to rank 2, as 7 ≤ 1.5 · 6: 5 | 4 | 9. Then rank 2's own expert 2 moves to rank 1: 5 | 6 | 7.
TEST(Adjust, SplitsAReplicatedExpertInHalves) {
  const BasePlacement base{.host = {0, 0, 2}, .replica = {1, -1, -1}};
  const Loads load = {9, 7, 2};
  EXPECT_THAT(rank_loads(base_parts(base, load), 3), ElementsAre(12, 4, 2));
  const std::vector<Move> moves = adjust(base, load, {.num_ranks = 3, .slots_per_rank = 3}, {});
  EXPECT_THAT(moves, ElementsAre(Move{1, 0, 2}, Move{2, 2, 1}));
  EXPECT_THAT(rank_loads(adjusted_parts(base, moves, load), 3), ElementsAre(5, 6, 7));
}

TEST(Adjust, NeverRaisesTheLargestLoadAndIsConsistent) {
  Random random(7);
  int num_moves = 0;
  for (int i = 0; i < 300; ++i) {
    const BaseShape shape{.num_ranks = 2 + static_cast<int>(random.below(6)), .slots_per_rank = 5};
    std::vector<int> host;
    Loads load;
    for (int e = 0; e < 3 * shape.num_ranks; ++e) {
      host.push_back(e / 3);
      load.push_back(static_cast<std::int64_t>(100 * std::pow(random.uniform(), 3)));
    }
    BasePlacement base = hosted(host);
    for (int r = 1; r < shape.num_ranks; ++r) {
      if (random.uniform() < 0.3) base.replica[3 * r - 1] = r;
    }
    const std::vector<Move> moves = adjust(base, load, shape, {});
    num_moves += static_cast<int>(moves.size());
    EXPECT_TRUE(is_consistent(base, moves, shape));
    const auto before = rank_loads(base_parts(base, load), shape.num_ranks);
    const auto after = rank_loads(adjusted_parts(base, moves, load), shape.num_ranks);
    if (moves.empty()) {
      EXPECT_EQ(before, after);
    } else {
      EXPECT_LT(std::ranges::max(after), std::ranges::max(before));
    }
  }
  EXPECT_GT(num_moves, 100);
}

TEST(TokenValidator, RejectsMovesThatLeaveTokensWithoutTheirExpert) {
  const auto holds = [](const std::vector<Move>& moves) { return is_consistent(kPairs, moves, kThreeRanks); };
  EXPECT_TRUE(holds({}));
  EXPECT_TRUE(holds({{0, 0, 2}, {4, 2, 0}}));
  EXPECT_FALSE(holds({{0, 1, 2}}));             // rank 1 does not hold expert 0
  EXPECT_FALSE(holds({{0, 0, 0}}));             // no destination
  EXPECT_FALSE(holds({{0, 0, 2}, {0, 0, 1}}));  // moved twice
  EXPECT_FALSE(holds({{0, 0, 2}, {1, 0, 2}}));  // a fourth expert on rank 2
}

}  // namespace
}  // namespace foremoe::review
