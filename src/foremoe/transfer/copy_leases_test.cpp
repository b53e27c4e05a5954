// Tests when copies start, which buffers they may write, which segments they contain and how many are in progress.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/testing/scripted_link.h"

namespace foremoe::test {
namespace {

using testing::ElementsAre;
using namespace std::chrono_literals;

TEST(TransferEngineThread, StartsNoCopyBeforeItsWaitUnlessEager) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  LinkLog log;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(log)}, {.eager = false});
  rank.engine().submit(TurnId{0});
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(log.num_requests(), 0U);
  EXPECT_TRUE(rank.engine().wait(TurnId{0}));
  EXPECT_EQ(log.num_requests(), 1U);
}

TEST(TransferEngineThread, StartsCopiesDepthTurnsAhead) {
  ScheduledCopy copy = one_copy();
  copy.arrives = copy.closes = TurnId{2};
  Cluster cluster = pair_with({copy});
  agree(cluster);
  LinkLog log;
  ASSERT_EQ(cluster.schedule().depth, 2);
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(log)});
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(log.num_requests(), 0U);
  rank.engine().submit(TurnId{0});
  log.await(1);
}

TEST(TransferEngineThread, WritesABufferOnlyAfterItsLastReaderIsReleased) {
  ScheduledCopy first = one_copy();
  ScheduledCopy second = one_copy();
  second.expert = ExpertId{2};
  second.opens = second.arrives = second.closes = TurnId{1};
  Cluster cluster = pair_with({first, second});
  agree(cluster);
  ClusterRank rank(cluster, RankId{0});
  rank.engine().submit(TurnId{0});
  ASSERT_TRUE(rank.engine().wait(TurnId{0}));
  ASSERT_TRUE(cluster.holds(RankId{0}, first, Pass::kForward));

  rank.engine().submit(TurnId{1});
  std::this_thread::sleep_for(5ms);
  EXPECT_TRUE(cluster.holds(RankId{0}, first, Pass::kForward)) << "its reader is still at work";
  rank.engine().release(TurnId{0});
  EXPECT_TRUE(rank.engine().wait(TurnId{1}));
  EXPECT_TRUE(cluster.holds(RankId{0}, second, Pass::kForward));
}

TEST(TransferEngineThread, SubmitsNoCopyIntoABufferBeforeItsRelease) {
  ScheduledCopy first = one_copy();
  first.closes = TurnId{1};
  ScheduledCopy second = one_copy();
  second.expert = ExpertId{2};
  second.opens = second.arrives = second.closes = TurnId{2};
  Cluster cluster = pair_with({first, second});
  agree(cluster);
  LinkLog log;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(log)});
  rank.engine().submit(TurnId{0});
  ASSERT_TRUE(rank.engine().wait(TurnId{0}));
  rank.engine().release(TurnId{0});
  rank.engine().submit(TurnId{1});
  rank.engine().submit(TurnId{2});  // begins before turn 1 is released
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(log.num_requests(), 1U);
  rank.engine().release(TurnId{1});
  log.await(2);
  EXPECT_TRUE(rank.engine().wait(TurnId{2}));
}

TEST(TransferEngineThread, CopiesOnlySegmentsThatAReaderOfTheLeaseNeeds) {
  const ExpertLayout layout({{.name = "both", .elements = 3},
                             {.name = "forward", .elements = 5, .in_backward = false},
                             {.name = "backward", .elements = 7, .in_forward = false}});
  ClusterShape shape = kPair;
  shape.micro_steps = 1;
  shape.backward = true;  // turn 0 forward, turn 1 backward
  struct Case {
    int arrives, closes;
    std::size_t bytes;
  };
  for (const Case& c : {Case{0, 0, 4 * 8}, Case{1, 1, 4 * 10}, Case{0, 1, 4 * 15}, Case{2, 2, 4 * 15}}) {
    for (const Path path : {Path::kHost, Path::kPeer}) {
      ScheduledCopy copy = one_copy(path);
      copy.arrives = TurnId{c.arrives};
      copy.closes = TurnId{c.closes};
      Cluster cluster(shape, complete(shape, {copy}, true), layout);
      agree(cluster);
      LinkLog log;
      ClusterRank::Links links{.host = scripted(log)};
      if (path == Path::kPeer) std::swap(links.host, links.peer);
      ClusterRank rank(cluster, RankId{0}, std::move(links));
      EXPECT_EQ(rank.run().wrong_turns, 0);
      EXPECT_THAT(log.bytes, ElementsAre(c.bytes)) << c.arrives << " to " << c.closes;
    }
  }
}

TEST(TransferEngineThread, RestoresHomesBeforeItFinishes) {
  ScheduledCopy home = one_copy();
  home.opens = home.arrives = home.closes = TurnId{3};
  Cluster cluster = pair_with({home});
  agree(cluster);
  ClusterRank rank(cluster, RankId{0}, {.must_arrive = true});
  rank.run();
  EXPECT_TRUE(cluster.holds(RankId{0}, home, Pass::kForward));
}

TEST(TransferEngineThread, LimitsTheCopiesInProgress) {
  ClusterShape shape = kPair;
  std::vector<ScheduledCopy> copies;
  for (int i = 0; i < kMaxCopiesUnderWay + 10; ++i) {
    copies.push_back(one_copy());
    copies.back().slot = SlotId{2 + i};
    copies.back().buffer = i;
  }
  Cluster cluster(shape, complete(shape, copies, true));
  agree(cluster);
  LinkLog host;
  {
    ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, std::deque<CopyState>(999, CopyState::kUnderWay))});
    rank.engine().submit(TurnId{0});
    host.await(kMaxCopiesUnderWay);
    std::this_thread::sleep_for(5ms);
    EXPECT_EQ(host.num_requests(), static_cast<std::size_t>(kMaxCopiesUnderWay));
  }
  EXPECT_EQ(host.cancelled, kMaxCopiesUnderWay) << "nothing writes any more";
}

}  // namespace
}  // namespace foremoe::test
