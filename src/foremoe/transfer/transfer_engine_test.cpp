// Tests with the engines of several ranks: experts arrive in time, and ranks agree on which turns are complete.

#include "foremoe/transfer/transfer_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/testing/scripted_link.h"

namespace foremoe::test {
namespace {

using testing::Each;
using namespace std::chrono_literals;

std::vector<ClusterRank::Run> run_all(std::span<const std::unique_ptr<ClusterRank>> ranks) {
  std::vector<ClusterRank::Run> runs(ranks.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < ranks.size(); ++r) threads.emplace_back([&, r] { runs[r] = ranks[r]->run(); });
  }
  return runs;
}

TEST(TransferEngineThread, DeliversEveryExpertInTimeOnBothPaths) {
  for (const bool backward : {false, true}) {
    const ClusterShape shape{.ranks = 4,
                             .ranks_per_node = 2,
                             .micro_steps = 4,
                             .layers = 3,
                             .experts = 8,
                             .guests = 2,
                             .backward = backward};
    Cluster cluster(shape, random_schedule(shape, 7));
    std::vector<std::unique_ptr<ClusterRank>> ranks;
    for (int r = 0; r < shape.ranks; ++r) ranks.push_back(std::make_unique<ClusterRank>(cluster, RankId{r}));
    TransferFigures all;
    for (const ClusterRank::Run& run : run_all(ranks)) {
      EXPECT_THAT(run.whole, Each(true));
      EXPECT_EQ(run.wrong_turns, 0);
    }
    for (const auto& rank : ranks) {
      const TransferFigures figures = rank->engine().figures();
      all.copies += figures.copies;
      all.failed_attempts += figures.failed_attempts;
      all.host_bytes += figures.host_bytes;
      all.peer_bytes += figures.peer_bytes;
    }
    const auto by_host = std::ranges::count(cluster.schedule().copies, Path::kHost, &ScheduledCopy::path);
    const auto by_peer = std::ranges::count(cluster.schedule().copies, Path::kPeer, &ScheduledCopy::path);
    EXPECT_EQ(all.copies, by_host + by_peer);
    EXPECT_EQ(all.failed_attempts, 0);
    EXPECT_EQ(all.host_bytes, Bytes{by_host * (37 * 4 + 16 * 2)});
    EXPECT_EQ(all.peer_bytes, Bytes{by_peer * (37 * 4 + 16 * 2)});
  }
}

TEST(TransferEngineThread, AllRanksLearnThatOneRankMissesAnExpert) {
  const ClusterShape shape{.ranks = 3, .ranks_per_node = 3, .micro_steps = 4, .layers = 2, .experts = 6};
  Cluster cluster(shape, random_schedule(shape, 3));
  LinkLog host;
  LinkLog peer;
  const std::deque<CopyState> thrice(3, CopyState::kFailed);
  std::vector<std::unique_ptr<ClusterRank>> ranks;
  ranks.push_back(std::make_unique<ClusterRank>(cluster, RankId{0}));
  ranks.push_back(std::make_unique<ClusterRank>(cluster, RankId{1},
                                                ClusterRank::Links{scripted(host, thrice), scripted(peer, thrice)}));
  ranks.push_back(std::make_unique<ClusterRank>(cluster, RankId{2}));
  const std::vector<ClusterRank::Run> runs = run_all(ranks);
  EXPECT_THAT(runs[1].whole, testing::Contains(false));
  EXPECT_EQ(runs[0].whole, runs[1].whole);
  EXPECT_EQ(runs[2].whole, runs[1].whole);
}

TEST(TransferEngineThread, FailsThePhaseIfOtherRanksNeverVote) {
  Cluster cluster = pair_with({one_copy()});
  ClusterRank rank(cluster, RankId{0}, {.timeout = 2ms});
  rank.engine().submit(TurnId{0});
  EXPECT_THROW(rank.engine().wait(TurnId{0}), PhaseFailed);
}

}  // namespace
}  // namespace foremoe::test
