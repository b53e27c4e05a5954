// Delayed, reordered, lost, failed and corrupted copies cause no hang and no wrong result, and every fallback is
// counted. FOREMOE_FAULT_SCHEDULES sets the number of random schedules (default 400); lab/performance.md reports
// 10,000.

#include <gmock/gmock.h>

#include <cstdlib>

#include "execution.h"
#include "foremoe/testing/faulty_link.h"

namespace foremoe::test {
namespace {

using namespace std::chrono_literals;

// A wrong expert or a lost gradient causes an error of at least 0.01. In tiny tensors with nearly cancelling terms,
// rounding causes errors up to 2e-5 in ten thousand draws.
constexpr double kWrong = 1e-4;

int num_schedules() {
  const char* wanted = std::getenv("FOREMOE_FAULT_SCHEDULES");
  return wanted != nullptr ? std::atoi(wanted) : 400;
}

std::unique_ptr<CopyLink> faulty(std::unique_ptr<CopyLink> link, const Faults& faults, std::uint64_t seed) {
  return std::make_unique<FaultyLink>(std::move(link), faults, seed);
}

// A scenario and the faults of its links, drawn from a seed.
Scenario faulty_scenario(std::uint64_t seed) {
  Random random(seed * 7919 + 1);
  const auto one_of = [&](auto... values) {
    const std::common_type_t<decltype(values)...> all[] = {values...};
    return all[random.below(sizeof...(values))];
  };
  Scenario scenario{.seed = seed,
                    .residency = one_of(Residency::kStatic, Residency::kResident, Residency::kShared),
                    .phase = one_of(Phase::kRecompute, Phase::kPolicyUpdate),
                    .path = one_of(PathChoice::kAuto, PathChoice::kHost, PathChoice::kPeer),
                    .depth = one_of(1, 2, 3)};
  if (scenario.phase == Phase::kPolicyUpdate) scenario.in_flight = one_of(1, 2);
  scenario.engine.timeout = 20ms;
  scenario.engine.ballot_timeout = 20s;  // long, so that a busy machine causes no timeout
  scenario.engine.attempts = 2;
  const double often = one_of(0.02, 0.1, 0.4);
  scenario.decorate = [seed, often](std::unique_ptr<CopyLink> link, RankId rank,
                                    Path path) -> std::unique_ptr<CopyLink> {
    return faulty(std::move(link),
                  {.delay = often,
                   .reorder = often,
                   .drop = often / 4,
                   .fail = often / 2,
                   // Copies from peers have no checksum, so corruption would not be detected.
                   .corrupt = path == Path::kHost ? often / 4 : 0},
                  seed * 1000 + rank.index() * 2 + static_cast<std::uint64_t>(path));
  };
  return scenario;
}

TEST(FaultsOnThreads, NeverCauseAWrongResultOrAHang) {
  int completed = 0;
  int failed = 0;
  std::int64_t fallbacks = 0;
  for (int i = 0; i < num_schedules(); ++i) {
    const Scenario scenario = faulty_scenario(static_cast<std::uint64_t>(i));
    try {
      const Execution execution = execute(scenario);
      EXPECT_LE(largest_error(execution, reference_of(scenario, execution), scenario), kWrong) << scenario.name();
      for (const RankResult& rank : execution.ranks) {
        EXPECT_EQ(rank.figures.fallbacks, execution.ranks[0].figures.fallbacks) << scenario.name();
      }
      fallbacks += execution.ranks[0].figures.fallbacks;
      ++completed;
    } catch (const PhaseFailed& error) {
      // Only a policy update may fail: some copies of its backward passes must arrive.
      EXPECT_EQ(scenario.phase, Phase::kPolicyUpdate) << error.what();
      ++failed;
    }
    if (HasFailure()) return;
  }
  RecordProperty("completed", completed);
  RecordProperty("failed", failed);
  RecordProperty("fallbacks", static_cast<int>(fallbacks));
  EXPECT_GT(completed, num_schedules() / 2);
  EXPECT_GT(fallbacks, 0) << "the faults were too few to mean anything";
}

TEST(FaultsOnThreads, ThatPersistMakeEveryLayerRunAtHomes) {
  Scenario scenario{.residency = Residency::kResident, .phase = Phase::kPolicyUpdate};
  scenario.engine.timeout = 20ms;
  scenario.engine.ballot_timeout = 20s;  // long, so that a busy machine causes no timeout
  scenario.engine.attempts = 2;
  scenario.decorate = [](std::unique_ptr<CopyLink> link, RankId rank, Path) -> std::unique_ptr<CopyLink> {
    return faulty(std::move(link), {.fail = 1.0}, rank.index());
  };
  const Execution execution = execute(scenario);
  EXPECT_GT(execution.ranks[0].figures.fallbacks, 0);
  EXPECT_LE(largest_error(execution, reference_of(scenario, execution), scenario), kWrong);
  for (const RankResult& rank : execution.ranks) EXPECT_EQ(rank.figures.transfer.copies, 0);
}

// Executors in other languages read the same plan, and the plan contains no fallbacks. The plan alone therefore
// determines which gradients are returned. A gradient is zero if no backward pass ran in the guest.
TEST(FaultsOnThreads, DoNotChangeWhichGradientsAreReturned) {
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared}) {
    Scenario scenario{.residency = residency, .phase = Phase::kPolicyUpdate};
    scenario.engine.timeout = 20ms;
    scenario.engine.ballot_timeout = 20s;
    scenario.engine.attempts = 1;
    const Execution sound = execute(scenario);
    scenario.decorate = [](std::unique_ptr<CopyLink> link, RankId rank, Path) -> std::unique_ptr<CopyLink> {
      return faulty(std::move(link), {.fail = 1.0}, rank.index());
    };
    const Execution broken = execute(scenario);
    EXPECT_GT(broken.ranks[0].figures.fallbacks, 0);
    EXPECT_LE(largest_error(broken, reference_of(scenario, broken), scenario), kWrong);
    std::int64_t bytes = 0;
    for (std::size_t r = 0; r < sound.ranks.size(); ++r) {
      EXPECT_EQ(broken.ranks[r].figures.gradient_returns, sound.ranks[r].figures.gradient_returns) << scenario.name();
      bytes += sound.ranks[r].figures.gradient_returns.value;
    }
    EXPECT_GT(bytes, 0);
  }
}

TEST(FaultsOnThreads, OnOneRankCauseTheSameFallbacksOnAllRanks) {
  Scenario scenario{.residency = Residency::kShared, .phase = Phase::kRecompute};
  scenario.engine.timeout = 20ms;
  scenario.engine.ballot_timeout = 20s;  // long, so that a busy machine causes no timeout
  scenario.engine.attempts = 1;
  scenario.decorate = [](std::unique_ptr<CopyLink> link, RankId rank, Path) -> std::unique_ptr<CopyLink> {
    return rank == RankId{1} ? faulty(std::move(link), {.fail = 1.0}, 1) : std::move(link);
  };
  const Execution execution = execute(scenario);
  for (const RankResult& rank : execution.ranks) {
    EXPECT_EQ(rank.figures.fallbacks, execution.ranks[1].figures.fallbacks);
  }
  EXPECT_GT(execution.ranks[1].figures.fallbacks, 0);
  EXPECT_LE(largest_error(execution, reference_of(scenario, execution), scenario), kWrong);
}

TEST(FaultsOnThreads, UnderFreeAreHandledByRetries) {
  for (const PathChoice path : {PathChoice::kHost, PathChoice::kPeer}) {
    Scenario scenario{.residency = Residency::kFree, .phase = Phase::kRecompute, .path = path};
    scenario.engine.timeout = 2s;
    scenario.engine.attempts = 50;
    const double corrupt = path == PathChoice::kHost ? 0.3 : 0;  // only the host path has checksums
    scenario.decorate = [=](std::unique_ptr<CopyLink> link, RankId rank, Path) -> std::unique_ptr<CopyLink> {
      return faulty(std::move(link), {.fail = 0.3, .corrupt = corrupt}, rank.index());
    };
    const Execution execution = execute(scenario);
    EXPECT_LE(largest_error(execution, reference_of(scenario, execution), scenario), kWrong) << scenario.name();
    EXPECT_EQ(execution.ranks[0].figures.fallbacks, 0);
  }
}

TEST(FaultsOnThreads, ThatEndAPhaseLeaveNoGradients) {
  // With two micro-steps in flight under `shared`, every backward pass fetches its guests again, and some copies fail.
  Scenario scenario{.residency = Residency::kShared, .phase = Phase::kPolicyUpdate, .in_flight = 2};
  scenario.engine.timeout = 20ms;
  scenario.engine.ballot_timeout = 20s;  // long, so that a busy machine causes no timeout
  scenario.engine.attempts = 1;
  scenario.decorate = [](std::unique_ptr<CopyLink> link, RankId rank, Path) -> std::unique_ptr<CopyLink> {
    return faulty(std::move(link), {.fail = 0.5}, 5 + rank.index());
  };
  int failed = 0;
  for (int seed = 1; seed <= 20; ++seed) {
    scenario.seed = static_cast<std::uint64_t>(seed);
    try {
      execute(scenario);
    } catch (const PhaseFailed& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("micro-step"));
      ++failed;
    }
  }
  EXPECT_GT(failed, 0);
}

}  // namespace
}  // namespace foremoe::test
