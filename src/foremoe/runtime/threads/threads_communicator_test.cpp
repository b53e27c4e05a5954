#include "foremoe/runtime/threads/threads_communicator.h"

#include <atomic>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <thread>

#include "foremoe/testing/address_space.h"
#include "foremoe/testing/communicator_conformance.h"

namespace foremoe {
namespace {

class Group {
 public:
  explicit Group(int num_ranks, const RankStart& start = {})
      : communicators_(make_threads_communicators({.num_ranks = num_ranks, .ranks_per_node = start.ranks_per_node},
                                                  start.timeout)) {}
  void run(const RankBody& body) {
    run_ranks(static_cast<int>(communicators_.size()), [&](RankId rank) { body(*communicators_[rank.index()]); });
  }

 private:
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

Backend threads(int num_ranks) {
  return {.name = std::to_string(num_ranks) + "_ranks",
          .run = [num_ranks](const RankStart& start, const RankBody& body) { Group(num_ranks, start).run(body); }};
}

INSTANTIATE_TEST_SUITE_P(Threads, CommunicatorConformance,
                         testing::Values(threads(1), threads(2), threads(3), threads(5), threads(8)),
                         [](const auto& parameter) { return parameter.param.name; });

TEST(ThreadsCommunicator, GivingUpEndsAllWaitsAndReportsTheReason) {
  Group group(4);
  group.run([](Communicator& communicator) {
    if (communicator.rank() == RankId{2}) return communicator.give_up("out of memory");
    try {
      communicator.barrier();
      ADD_FAILURE() << "rank 2 was not there";
    } catch (const PeerFailed& failed) {
      EXPECT_THAT(failed.what(), testing::AllOf(testing::HasSubstr("rank 2"), testing::HasSubstr("out of memory")));
    }
    EXPECT_THROW(communicator.barrier(), PeerFailed) << "a group that failed once stays so";
  });
}

TEST(ThreadsCommunicator, AnUndecidableBallotThrows) {
  Group group(3);
  group.run([](Communicator& communicator) {
    const std::unique_ptr<Ballot> ballot = communicator.peers().make_ballot();
    ballot->cast(0, true);
    if (communicator.rank() == RankId{0}) return communicator.give_up("test");
    ballot->cast(1, true);
    const auto wait = [&](std::uint64_t number) {
      while (!ballot->outcome(number)) std::this_thread::yield();
    };
    EXPECT_THROW(wait(1), PeerFailed);
  });
}

TEST(ThreadsCommunicator, ATimeoutNamesTheMissingRanks) {
  Group group(4, {.timeout = std::chrono::milliseconds{100}});
  group.run([](Communicator& communicator) {
    if (communicator.rank().value % 2 == 1) return;
    try {
      communicator.barrier();
    } catch (const PeerFailed& failed) {
      EXPECT_THAT(failed.what(), testing::HasSubstr("rank 1, 3"));
    }
  });
}

TEST(ThreadsCommunicator, EndingSharingWaitsForAllRanksAndAllowsSharingAgain) {
  Group group(5, {.timeout = std::chrono::seconds{60}});
  std::atomic<int> readers = 0;
  group.run([&](Communicator& communicator) {
    std::vector<std::byte> memory(64);
    const SharedRegion region{.bytes = memory, .name = ""};
    for (int round = 0; round < 200; ++round) {
      communicator.peers().share(std::span(&region, 1));
      ++readers;
      if ((round + communicator.rank().value) % 3 == 0) std::this_thread::yield();
      --readers;
      communicator.peers().stop_sharing(false);
      EXPECT_EQ(readers, 0) << "round " << round;
      communicator.barrier();
    }
    // Without a barrier, a rank may share again before others notice that all ranks had stopped sharing.
    for (int round = 0; round < 200; ++round) {
      communicator.peers().share(std::span(&region, 1));
      communicator.peers().stop_sharing(false);
    }
  });
}

TEST(ThreadsCommunicator, RejectsSumsOfDifferentLengths) {
  Group group(3);
  std::atomic<int> refused = 0;
  group.run([&](Communicator& communicator) {
    std::vector<float> values(communicator.rank() == RankId{1} ? 5 : 4);
    try {
      communicator.all_reduce_sum(values);
    } catch (const PhaseFailed&) {
      ++refused;
    } catch (const PeerFailed&) {
    }
  });
  EXPECT_GE(refused, 1);
}

// Ranks fail at different points of a call while others still copy from their buffers. asan and tsan detect memory that
// is freed too early.
TEST(ThreadsCommunicator, MemoryOfAFailedRankIsNotReadAfterItLeaves) {
  for (int repeat = 0; repeat < 30; ++repeat) {
    Group group(5);
    group.run([&](Communicator& communicator) {
      for (int round = 0; round < 10; ++round) {
        try {
          auto blocks = std::make_unique<conformance::Blocks>(round, communicator, 500);
          if (round == 5 + repeat % 3 && communicator.rank().value == repeat % 5) return communicator.give_up("test");
          communicator.exchange(blocks->exchange());
          EXPECT_EQ(blocks->received, blocks->expected);
        } catch (const PeerFailed&) {
          return;
        }
      }
    });
  }
}

TEST(RunRanksThread, RethrowsTheCauseInsteadOfItsConsequences) {
  const auto run = [](auto f) {
    try {
      run_ranks(4, f);
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(run([](RankId) {}), "");
  EXPECT_EQ(run([](RankId rank) {
              if (rank.value < 2) throw PeerFailed("rank 2 gave up");
              if (rank == RankId{2}) throw std::runtime_error("cause");
            }),
            "cause");
  EXPECT_EQ(run([](RankId rank) {
              if (rank.value > 0) throw PeerFailed(std::to_string(rank.value));
            }),
            "1");
}

TEST(RunRanksThread, EveryRankRunsOnce) {
  std::vector<int> runs(9);
  run_ranks(9, [&](RankId rank) { ++runs[rank.index()]; });
  EXPECT_THAT(runs, testing::Each(1));
}

TEST(RunRanksDeathTest, RunsNoRankIfNotAllThreadsStart) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer cannot live in little address space";
  EXPECT_EXIT(
      {
        std::atomic<int> runs = 0;
        test::forbid_more_address_space();  // leaves no room for a stack
        try {
          run_ranks(64, [&](RankId) { ++runs; });
        } catch (const std::system_error& error) {
          const bool says_why = std::string_view(error.what()).find("64 ranks") != std::string_view::npos;
          std::exit(says_why && runs == 0 ? 0 : 1);
        }
        std::exit(2);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace foremoe
