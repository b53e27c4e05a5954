// Tests random schedules with random faults: complete turns have correct experts, ranks agree, and no rank hangs.

#include <gtest/gtest.h>

#include <string>

#include "foremoe/testing/faulty_link.h"
#include "foremoe/testing/transfer_cluster.h"

namespace foremoe::test {
namespace {

using namespace std::chrono_literals;

constexpr int kSeeds = 300;

struct Ending {
  ClusterRank::Run run;
  std::string failure;  // of the phase; empty if it succeeded
};

Ending run_to_the_end(ClusterRank& rank) try { return {.run = rank.run()}; } catch (const PhaseFailed& error) {
  return {.failure = error.what()};
}

struct Totals {
  int phases_failed = 0;
  std::int64_t failed_attempts = 0;
  int refused_turns = 0;
  int whole_turns = 0;
};

Faults random_faults(Random& random) {
  const auto up_to = [&](double most) { return random.below(2) == 0 ? 0.0 : most * random.uniform(); };
  return {.delay = up_to(0.5), .reorder = up_to(0.5), .drop = up_to(0.1), .fail = up_to(0.5), .corrupt = up_to(0.4)};
}

void run_seed(std::uint64_t seed, Totals& totals) {
  Random random(seed);
  const int ranks = 2 + static_cast<int>(random.below(3));
  const ClusterShape shape{.ranks = ranks,
                           .ranks_per_node = 1 + static_cast<int>(random.below(static_cast<std::uint64_t>(ranks))),
                           .micro_steps = 1 + static_cast<int>(random.below(4)),
                           .layers = 1 + static_cast<int>(random.below(3)),
                           .experts = 4 * ranks,
                           .guests = 1 + static_cast<int>(random.below(2)),
                           .backward = random.below(2) == 0};
  const bool everything_in_arenas = random.below(2) == 0;
  Cluster cluster(shape, random_schedule(shape, seed, everything_in_arenas));
  const Faults host_faults = random_faults(random);
  Faults peer_faults = random_faults(random);
  peer_faults.corrupt = 0;  // only the host path has checksums
  const EngineOptions options{.attempts = 1 + static_cast<int>(random.below(3)),
                              .timeout = 2ms,
                              .eager = random.below(4) != 0,
                              .ballot_timeout = 60s};

  std::vector<std::unique_ptr<ClusterRank>> engines;
  for (int r = 0; r < ranks; ++r) {
    const auto faulty = [&](const Faults& faults) {
      return std::make_unique<FaultyLink>(std::make_unique<MemcpyLink>(), faults, random.bits());
    };
    engines.push_back(std::make_unique<ClusterRank>(
        cluster, RankId{r}, ClusterRank::Links{.host = faulty(host_faults), .peer = faulty(peer_faults)}, options));
  }
  std::vector<Ending> endings(engines.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < engines.size(); ++r) {
      threads.emplace_back([&, r] { endings[r] = run_to_the_end(*engines[r]); });
    }
  }
  const Ending* first = nullptr;
  for (std::size_t r = 0; r < engines.size(); ++r) {
    const Ending& ending = endings[r];
    totals.failed_attempts += engines[r]->engine().figures().failed_attempts;
    EXPECT_EQ(ending.run.wrong_turns, 0) << "seed " << seed << ", rank " << r;
    if (!ending.failure.empty()) {
      ++totals.phases_failed;
      continue;
    }
    if (first == nullptr) first = &ending;
    EXPECT_EQ(ending.run.whole, first->run.whole) << "seed " << seed << ", rank " << r;
    totals.refused_turns += static_cast<int>(std::ranges::count(ending.run.whole, false));
    totals.whole_turns += static_cast<int>(std::ranges::count(ending.run.whole, true));
  }
}

TEST(TransferFaultsThread, FaultsNeverCauseWrongTurnsDisagreementOrHangs) {
  Totals totals;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) run_seed(seed, totals);
  // Otherwise the test would be vacuous.
  EXPECT_GT(totals.failed_attempts, kSeeds);
  EXPECT_GT(totals.refused_turns, kSeeds / 10);
  EXPECT_GT(totals.whole_turns, kSeeds);
  EXPECT_EQ(totals.phases_failed, 0) << "every missing copy has a home to fall back to";
}

TEST(TransferFaultsThread, RefetchesADamagedCopyFromTheArena) {
  const ClusterShape shape{.ranks = 2, .ranks_per_node = 2, .experts = 4};
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Cluster cluster(
        shape,
        complete(
            shape,
            {{.rank = RankId{0}, .expert = ExpertId{3}, .slot = SlotId{2}, .path = Path::kHost, .source = RankId{1}}},
            true));
    for (std::uint64_t n = 0; n < 9; ++n) cluster.ballot().cast(n, true);
    ClusterRank rank(cluster, RankId{0},
                     {.host = std::make_unique<FaultyLink>(std::make_unique<MemcpyLink>(), Faults{.corrupt = 1}, seed)},
                     {.attempts = 2});
    const ClusterRank::Run run = rank.run();
    EXPECT_TRUE(run.whole[0]);
    EXPECT_EQ(run.wrong_turns, 0);
    EXPECT_EQ(rank.engine().figures().failed_attempts, 1);
    EXPECT_EQ(rank.engine().figures().host_bytes, Bytes{0});
  }
}

}  // namespace
}  // namespace foremoe::test
