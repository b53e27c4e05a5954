#include "foremoe/transfer/transfer_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "foremoe/transfer/test_engines.h"

namespace foremoe::test {
namespace {

using testing::Each;
using testing::ElementsAre;
using namespace std::chrono_literals;

ScheduledCopy one_copy(Path path = Path::kHost) {
  return {.rank = RankId{0},
          .layer = LayerId{0},
          .expert = ExpertId{3},
          .slot = SlotId{2},
          .buffer = 0,
          .path = path,
          .source = RankId{1}};
}

// Two ranks, two experts each; only rank 0 receives, and rank 1 is played by the test where it matters.
constexpr ClusterShape kPair{.ranks = 2, .ranks_per_node = 2, .micro_steps = 3, .experts = 4};

Cluster pair_with(std::vector<ScheduledCopy> copies, bool everything = true) {
  return Cluster(kPair, complete(kPair, std::move(copies), everything));
}

// The other rank always agrees.
void agree(Cluster& cluster) {
  for (std::uint64_t n = 0; n < 100; ++n) cluster.ballot().cast(n, true);
}

// What happened on a link, from outside: shared with the test.
struct Log {
  std::mutex mutex;
  std::vector<CopyRequest> requests;
  std::vector<std::size_t> bytes;
  int cancelled = 0;

  std::size_t num_requests() {
    const std::lock_guard lock(mutex);
    return requests.size();
  }
  void await(std::size_t n) {
    while (num_requests() < n) std::this_thread::sleep_for(100us);
  }
};

// Copies, or answers otherwise as it is told: one answer per request, in order, and kDone for those beyond.
class ScriptedLink final : public CopyLink {
 public:
  ScriptedLink(Log& log, std::deque<CopyState> answers) : log_(log), answers_(std::move(answers)) {}

  void submit(const CopyRequest& request) override {
    const std::lock_guard lock(log_.mutex);
    log_.requests.push_back(request);
    log_.bytes.push_back(0);
    for (const Chunk& chunk : request.chunks) log_.bytes.back() += chunk.bytes;
    CopyState answer = CopyState::kDone;
    if (!answers_.empty()) {
      answer = answers_.front();
      answers_.pop_front();
    }
    answer_of_.emplace_back(request.id, answer);
    if (answer != CopyState::kDone) return;
    for (const Chunk& chunk : request.chunks) {
      if (chunk.from != nullptr) std::memcpy(chunk.to, chunk.from, chunk.bytes);
    }
  }
  CopyState poll(CopyId id) override {
    return std::ranges::find(answer_of_, id, [](const auto& a) { return a.first; })->second;
  }
  void cancel(CopyId) override {
    const std::lock_guard lock(log_.mutex);
    ++log_.cancelled;
  }
  void progress() override {}

 private:
  Log& log_;
  std::deque<CopyState> answers_;
  std::vector<std::pair<CopyId, CopyState>> answer_of_;
};

std::unique_ptr<CopyLink> scripted(Log& log, std::deque<CopyState> answers = {}) {
  return std::make_unique<ScriptedLink>(log, std::move(answers));
}

std::vector<ClusterRank::Run> run_all(std::span<const std::unique_ptr<ClusterRank>> ranks) {
  std::vector<ClusterRank::Run> runs(ranks.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < ranks.size(); ++r) threads.emplace_back([&, r] { runs[r] = ranks[r]->run(); });
  }
  return runs;
}

TEST(TransferEngineThread, BringsEveryExpertByBothPathsInTime) {
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

TEST(TransferEngineThread, StartsNoCopyUntilItsWaitWhereCopiesAreNotToOverlap) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  Log log;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(log)}, {.eager = false});
  rank.engine().submit(TurnId{0});
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(log.num_requests(), 0U);
  EXPECT_TRUE(rank.engine().wait(TurnId{0}));
  EXPECT_EQ(log.num_requests(), 1U);
}

TEST(TransferEngineThread, StartsACopyAsManyTurnsAheadAsTheDepthSays) {
  ScheduledCopy copy = one_copy();
  copy.arrives = copy.closes = TurnId{2};
  Cluster cluster = pair_with({copy});
  agree(cluster);
  Log log;
  ASSERT_EQ(cluster.schedule().depth, 2);
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(log)});
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(log.num_requests(), 0U);
  rank.engine().submit(TurnId{0});
  log.await(1);
}

// Events of this stream happen when the test says so.
class HeldStream final : public Stream {
 public:
  Event record() override { return {this, 1}; }
  void wait(const Event&) override {}
  bool done(const Event& event) const override { return happened_.load() >= event.number; }
  void synchronize() override {}
  void happen() { happened_ = 1; }

 private:
  std::atomic<std::uint64_t> happened_ = 0;
};

TEST(TransferEngineThread, WritesABufferOnlyAfterTheLastReaderOfTheFormerLeaseIsDone) {
  ScheduledCopy first = one_copy();
  ScheduledCopy second = one_copy();
  second.expert = ExpertId{2};
  second.opens = second.arrives = second.closes = TurnId{1};
  Cluster cluster = pair_with({first, second});
  agree(cluster);
  HeldStream stream;
  ClusterRank rank(cluster, RankId{0});
  rank.engine().submit(TurnId{0});
  ASSERT_TRUE(rank.engine().wait(TurnId{0}));
  ASSERT_TRUE(cluster.holds(RankId{0}, first, Pass::kForward));

  rank.engine().release(TurnId{0}, stream.record());
  rank.engine().submit(TurnId{1});
  std::this_thread::sleep_for(5ms);
  EXPECT_TRUE(cluster.holds(RankId{0}, first, Pass::kForward)) << "its reader is still at work";
  stream.happen();
  EXPECT_TRUE(rank.engine().wait(TurnId{1}));
  EXPECT_TRUE(cluster.holds(RankId{0}, second, Pass::kForward));
}

TEST(TransferEngineThread, DoesNotEvenAskForABufferThatHasNotBeenReleased) {
  ScheduledCopy first = one_copy();
  first.closes = TurnId{1};
  ScheduledCopy second = one_copy();
  second.expert = ExpertId{2};
  second.opens = second.arrives = second.closes = TurnId{2};
  Cluster cluster = pair_with({first, second});
  agree(cluster);
  Log log;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(log)});
  rank.engine().submit(TurnId{0});
  ASSERT_TRUE(rank.engine().wait(TurnId{0}));
  rank.engine().release(TurnId{0}, {});
  rank.engine().submit(TurnId{1});
  rank.engine().submit(TurnId{2});  // begun before turn 1 was released
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(log.num_requests(), 1U);
  rank.engine().release(TurnId{1}, {});
  log.await(2);
  EXPECT_TRUE(rank.engine().wait(TurnId{2}));
}

TEST(TransferEngineThread, TakesTheOtherPathWhenThePlannedOneFails) {
  for (const Path planned : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(planned)});
    agree(cluster);
    Log failing;
    Log other;
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

TEST(TransferEngineThread, GivesALateCopyUpAndTriesAgain) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  Log host;
  Log peer;
  ClusterRank rank(cluster, RankId{0},
                   {.host = scripted(host, {CopyState::kUnderWay}), .peer = scripted(peer, {CopyState::kUnderWay})},
                   {.timeout = 2ms});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(host.num_requests(), 2U);
  EXPECT_EQ(host.cancelled + peer.cancelled, 2);
}

TEST(TransferEngineThread, AsksTheSamePathAgainWhereThereIsNoOther) {
  Cluster cluster = pair_with({one_copy(Path::kPeer)}, false);
  agree(cluster);
  Log peer;
  ClusterRank rank(cluster, RankId{0}, {.peer = scripted(peer, {CopyState::kFailed, CopyState::kFailed})});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(peer.num_requests(), 3U);
}

TEST(TransferEngineThread, AsksByMessageWhereAHomeIsNotMapped) {
  ScheduledCopy other_rank = one_copy(Path::kPeer);
  other_rank.rank = RankId{1};
  other_rank.expert = ExpertId{0};
  other_rank.arrives = other_rank.closes = TurnId{0};
  ScheduledCopy mine = one_copy(Path::kPeer);
  mine.arrives = mine.closes = TurnId{1};
  Cluster cluster = pair_with({other_rank, mine}, false);
  cluster.unmap_homes();
  agree(cluster);
  Log peer;
  ClusterRank rank(cluster, RankId{0}, {.peer = scripted(peer)});
  rank.run();
  ASSERT_EQ(peer.num_requests(), 1U);
  EXPECT_EQ(peer.requests[0].message, 1) << "its place in the schedule";
  EXPECT_EQ(peer.requests[0].source, RankId{1});
}

TEST(TransferEngineThread, NeverAsksAnUnmappedPeerForWhatTheHostWasToBring) {
  Cluster cluster = pair_with({one_copy(Path::kHost)});
  cluster.unmap_homes();
  agree(cluster);
  Log host;
  Log peer;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, {CopyState::kFailed}), .peer = scripted(peer)});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(host.num_requests(), 2U);
  EXPECT_EQ(peer.num_requests(), 0U);
}

TEST(TransferEngineThread, NeverUsesAStaleVersion) {
  for (const Path path : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(path)});
    cluster.write_homes(2);  // the owners' optimizer step is done; nobody has published it
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

TEST(TransferEngineThread, RefusesWhatItsOwnerHasSincePublishedAnew) {
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

TEST(TransferEngineThread, FetchesAMissingGuestAgainForTheNextTurnThatReadsIt) {
  ScheduledCopy copy = one_copy();
  copy.closes = TurnId{2};
  Cluster cluster = pair_with({copy}, true);
  agree(cluster);
  Log host;
  Log peer;
  const std::deque<CopyState> once{CopyState::kFailed};
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, once), .peer = scripted(peer, once)}, {.attempts = 2});
  const ClusterRank::Run run = rank.run();
  EXPECT_THAT(run.whole, ElementsAre(false, true, true));
  EXPECT_EQ(run.wrong_turns, 0);
  EXPECT_EQ(rank.engine().figures().copies, 1);
  EXPECT_EQ(rank.engine().figures().failed_attempts, 2);
  EXPECT_EQ(cluster.ballot().num_votes(), 100U);
}

TEST(TransferEngineThread, DoesNotFetchAgainWhatNoTurnReadsAnyMore) {
  Cluster cluster = pair_with({one_copy()}, true);
  agree(cluster);
  Log host;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, {CopyState::kFailed}), .peer = nullptr},
                   {.attempts = 1});
  EXPECT_THAT(rank.run().whole, ElementsAre(false, true, true));
  EXPECT_EQ(host.num_requests(), 1U);
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
      Log log;
      ClusterRank::Links links{.host = scripted(log)};
      if (path == Path::kPeer) std::swap(links.host, links.peer);
      ClusterRank rank(cluster, RankId{0}, std::move(links));
      EXPECT_EQ(rank.run().wrong_turns, 0);
      EXPECT_THAT(log.bytes, ElementsAre(c.bytes)) << c.arrives << " to " << c.closes;
    }
  }
}

TEST(TransferEngineThread, KeepsTryingWhereThereIsNoHomeToFallBackTo) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  Log host;
  Log peer;
  ClusterRank rank(cluster, RankId{0},
                   {.host = scripted(host, std::deque<CopyState>(9, CopyState::kFailed)), .peer = scripted(peer)},
                   {.attempts = 2, .must_arrive = true});
  EXPECT_THAT(rank.run().whole, Each(true));
  EXPECT_EQ(host.num_requests(), 10U);
  EXPECT_EQ(peer.num_requests(), 0U) << "homes are not pinned";
}

TEST(TransferEngineThread, EndsTheStageWhenWhatMustArriveDoesNot) {
  Cluster cluster = pair_with({one_copy()});
  agree(cluster);
  Log host;
  ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, std::deque<CopyState>(9999, CopyState::kFailed))},
                   {.attempts = 2, .timeout = 3ms, .must_arrive = true});
  rank.engine().submit(TurnId{0});
  EXPECT_THROW(rank.engine().wait(TurnId{0}), StageFailed);
  EXPECT_THROW(rank.engine().submit(TurnId{1}), StageFailed);
}

TEST(TransferEngineThread, BringsHomesBackBeforeItFinishes) {
  ScheduledCopy home = one_copy();
  home.opens = home.arrives = home.closes = TurnId{3};
  Cluster cluster = pair_with({home});
  agree(cluster);
  ClusterRank rank(cluster, RankId{0}, {.must_arrive = true});
  rank.run();
  EXPECT_TRUE(cluster.holds(RankId{0}, home, Pass::kForward));
}

TEST(TransferEngineThread, DoesNotWaitForeverForRanksThatNeverVote) {
  Cluster cluster = pair_with({one_copy()});
  ClusterRank rank(cluster, RankId{0}, {.timeout = 2ms});
  rank.engine().submit(TurnId{0});
  EXPECT_THROW(rank.engine().wait(TurnId{0}), StageFailed);
}

TEST(TransferEngineThread, AllRanksHearThatOneOfThemMissesAnExpert) {
  const ClusterShape shape{.ranks = 3, .ranks_per_node = 3, .micro_steps = 4, .layers = 2, .experts = 6};
  Cluster cluster(shape, random_schedule(shape, 3));
  Log host;
  Log peer;
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

TEST(TransferEngineThread, HasNoMoreCopiesUnderWayThanItsLimit) {
  ClusterShape shape = kPair;
  std::vector<ScheduledCopy> copies;
  for (int i = 0; i < kMaxCopiesUnderWay + 10; ++i) {
    copies.push_back(one_copy());
    copies.back().slot = SlotId{2 + i};
    copies.back().buffer = i;
  }
  Cluster cluster(shape, complete(shape, copies, true));
  agree(cluster);
  Log host;
  {
    ClusterRank rank(cluster, RankId{0}, {.host = scripted(host, std::deque<CopyState>(999, CopyState::kUnderWay))});
    rank.engine().submit(TurnId{0});
    host.await(kMaxCopiesUnderWay);
    std::this_thread::sleep_for(5ms);
    EXPECT_EQ(host.num_requests(), static_cast<std::size_t>(kMaxCopiesUnderWay));
  }
  EXPECT_EQ(host.cancelled, kMaxCopiesUnderWay) << "nothing writes any more";
}

TEST(TransferEngineThread, ALinkThatThrowsEndsTheStageWithItsException) {
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

}  // namespace
}  // namespace foremoe::test
