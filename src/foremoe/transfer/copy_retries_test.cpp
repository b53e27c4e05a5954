// Tests the path and number of retries and the final outcome of copies that fail, are late or have another version.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/testing/scripted_link.h"

namespace foremoe::test {
namespace {

using testing::Each;
using testing::ElementsAre;
using namespace std::chrono_literals;

TEST(TransferEngineThread, TakesTheOtherPathWhenThePlannedOneFails) {
  for (const Path planned : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(planned)});
    agree(cluster);
    LinkLog failing;
    LinkLog other;
    ClusterRank::Links links{.host = scripted(failing, {CopyState::kFailed}), .peer = scripted(other)};
    if (planned == Path::kPeer) std::swap(links.host, links.peer);
    ClusterRank rank(cluster, RankId{0}, std::move(links));
    EXPECT_THAT(rank.run().whole, Each(true));
    EXPECT_EQ(failing.num_requests(), 1U);
    EXPECT_EQ(other.num_requests(), 1U);
    EXPECT_EQ(rank.engine().figures().failed_attempts, 1);
    EXPECT_EQ(rank.engine().figures().copies, 1);
    EXPECT_EQ(rank.engine().figures().host_bytes.value > 0, planned == Path::kPeer);
  }
}

TEST(TransferEngineThread, CancelsALateCopyAndRetries) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  LinkLog host;
  LinkLog peer;
  ClusterRank rank(cluster, RankId{0},
                   {.host = scripted(host, {CopyState::kUnderWay}), .peer = scripted(peer, {CopyState::kUnderWay})},
                   {.timeout = 2ms});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(host.num_requests(), 2U);
  EXPECT_EQ(host.cancelled + peer.cancelled, 2);
}

TEST(TransferEngineThread, RetriesTheSamePathIfThereIsNoOther) {
  Cluster cluster = pair_with({one_copy(Path::kPeer)}, false);
  agree(cluster);
  LinkLog peer;
  ClusterRank rank(cluster, RankId{0}, {.peer = scripted(peer, {CopyState::kFailed, CopyState::kFailed})});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(peer.num_requests(), 3U);
}

TEST(TransferEngineThread, RequestsByMessageIfAHomeIsNotMapped) {
  ScheduledCopy other_rank = one_copy(Path::kPeer);
  other_rank.rank = RankId{1};
  other_rank.expert = ExpertId{0};
  other_rank.arrives = other_rank.closes = TurnId{0};
  ScheduledCopy mine = one_copy(Path::kPeer);
  mine.arrives = mine.closes = TurnId{1};
  Cluster cluster = pair_with({other_rank, mine}, false);
  cluster.unmap_homes();
  agree(cluster);
  LinkLog peer;
  ClusterRank rank(cluster, RankId{0}, {.peer = scripted(peer)});
  rank.run();
  ASSERT_EQ(peer.num_requests(), 1U);
  EXPECT_EQ(peer.requests[0].message, 1) << "its place in the schedule";
  EXPECT_EQ(peer.requests[0].source, RankId{1});
}

TEST(TransferEngineThread, NeverRequestsHostPathCopiesFromAnUnmappedPeer) {
  Cluster cluster = pair_with({one_copy(Path::kHost)});
  cluster.unmap_homes();
  agree(cluster);
  LinkLog host;
  LinkLog peer;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, {CopyState::kFailed}), .peer = scripted(peer)});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(host.num_requests(), 2U);
  EXPECT_EQ(peer.num_requests(), 0U);
}

TEST(TransferEngineThread, FetchesAMissingGuestAgainForTheNextTurnThatReadsIt) {
  ScheduledCopy copy = one_copy();
  copy.closes = TurnId{2};
  Cluster cluster = pair_with({copy}, true);
  agree(cluster);
  LinkLog host;
  LinkLog peer;
  const std::deque<CopyState> once{CopyState::kFailed};
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, once), .peer = scripted(peer, once)}, {.attempts = 2});
  const ClusterRank::Run run = rank.run();
  EXPECT_THAT(run.whole, ElementsAre(false, true, true));
  EXPECT_EQ(run.wrong_turns, 0);
  EXPECT_EQ(rank.engine().figures().copies, 1);
  EXPECT_EQ(rank.engine().figures().failed_attempts, 2);
  EXPECT_EQ(cluster.ballot().num_votes(), 100U);
}

TEST(TransferEngineThread, DoesNotRefetchAnExpertThatNoLaterTurnReads) {
  Cluster cluster = pair_with({one_copy()}, true);
  agree(cluster);
  LinkLog host;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, {CopyState::kFailed}), .peer = nullptr},
                   {.attempts = 1});
  EXPECT_THAT(rank.run().whole, ElementsAre(false, true, true));
  EXPECT_EQ(host.num_requests(), 1U);
}

TEST(TransferEngineThread, KeepsRetryingIfCopiesMustArrive) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  LinkLog host;
  LinkLog peer;
  ClusterRank rank(cluster, RankId{0},
                   {.host = scripted(host, std::deque<CopyState>(9, CopyState::kFailed)), .peer = scripted(peer)},
                   {.attempts = 2, .must_arrive = true});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(host.num_requests(), 10U);
  EXPECT_EQ(peer.num_requests(), 0U) << "homes are not pinned";
}

TEST(TransferEngineThread, FailsThePhaseIfARequiredCopyDoesNotArrive) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  LinkLog host;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, std::deque<CopyState>(9999, CopyState::kFailed))},
                   {.attempts = 2, .timeout = 3ms, .must_arrive = true});
  rank.engine().submit(TurnId{0});
  EXPECT_THROW(rank.engine().wait(TurnId{0}), PhaseFailed);
  EXPECT_THROW(rank.engine().submit(TurnId{1}), PhaseFailed);
}

TEST(TransferEngineThread, RethrowsTheExceptionOfALink) {
  struct Broken final : CopyLink {
    void submit(const CopyRequest&) override { throw std::logic_error("no carrier"); }
    CopyState poll(CopyId) override { return CopyState::kUnderWay; }
    void cancel(CopyId) override {}
    void progress() override {}
  };
  Cluster cluster = pair_with({one_copy()});
  ClusterRank rank(cluster, RankId{0}, {.host = std::make_unique<Broken>()});
  rank.engine().submit(TurnId{0});
  EXPECT_THROW(rank.engine().wait(TurnId{0}), std::logic_error);
}

TEST(TransferEngineThread, NeverUsesAStaleVersion) {
  for (const Path path : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(path)});
    cluster.write_homes(2);  // the owners have run the optimizer step, but published nothing
    agree(cluster);
    ClusterRank rank(cluster, RankId{0}, {.version = 2, .attempts = 2, .timeout = 3ms});
    rank.engine().submit(TurnId{0});
    EXPECT_FALSE(rank.engine().wait(TurnId{0}));
    EXPECT_EQ(rank.engine().figures().copies, 0);
  }
}

TEST(TransferEngineThread, WaitsForTheOwnerToPublish) {
  for (const Path path : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(path)});
    cluster.write_homes(2);
    agree(cluster);
    ClusterRank rank(cluster, RankId{0}, {.version = 2});
    rank.engine().submit(TurnId{0});
    std::this_thread::sleep_for(2ms);
    cluster.publish_arena(0, 2);
    cluster.publish(RankId{1}, 2);
    EXPECT_TRUE(rank.engine().wait(TurnId{0}));
    EXPECT_TRUE(cluster.holds_all(RankId{0}, TurnId{0}));
    EXPECT_EQ(rank.engine().figures().failed_attempts, 0);
  }
}

TEST(TransferEngineThread, RejectsALaterVersion) {
  for (const Path path : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(path)});
    cluster.write_homes(2);
    cluster.publish_arena(0, 2);
    cluster.publish(RankId{1}, 2);
    agree(cluster);
    ClusterRank rank(cluster, RankId{0}, {.version = 1});
    rank.engine().submit(TurnId{0});
    EXPECT_FALSE(rank.engine().wait(TurnId{0}));
    EXPECT_EQ(rank.engine().figures().copies, 0);
  }
}

}  // namespace
}  // namespace foremoe::test
