#pragma once

// Conformance tests for communicators. Each backend instantiates them with its own way to start ranks:
//
//   INSTANTIATE_TEST_SUITE_P(Threads, CommunicatorConformance, testing::Values(…));
//
// Each rank computes the expected data from the data that the others send. All ranks check expectations.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

struct RankStart {
  int ranks_per_node = 8;
  std::chrono::milliseconds timeout{20'000};
};
using RankBody = std::function<void(Communicator&)>;

// Runs `body` on every rank of a backend.
struct Backend {
  std::string name;
  std::function<void(const RankStart&, const RankBody&)> run;
};
inline void PrintTo(const Backend& backend, std::ostream* os) { *os << backend.name; }

class CommunicatorConformance : public testing::TestWithParam<Backend> {
 protected:
  void run(const RankBody& body) { GetParam().run({}, body); }
  void run(const RankStart& start, const RankBody& body) { GetParam().run(start, body); }
};

namespace conformance {

// The block from source to destination in a round. Some blocks are empty, some large.
inline std::vector<std::uint32_t> block(int round, int source, int destination, int factor) {
  const int kind = (round + 3 * source + 5 * destination) % 4;
  const int words = kind == 0 ? 0 : factor * (1 + (7 * source + 11 * destination + round) % 13);
  std::vector<std::uint32_t> values(static_cast<std::size_t>(words));
  const auto who = static_cast<std::uint32_t>((round * 64 + source) * 64 + destination);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = who * 65'536 + static_cast<std::uint32_t>(i);
  return values;
}

struct Blocks {
  std::vector<std::uint32_t> send, received, expected;
  std::vector<std::int64_t> send_bytes, receive_bytes;

  Blocks(int round, const Communicator& communicator, int factor) {
    for (int r = 0; r < communicator.num_ranks(); ++r) {
      const std::vector<std::uint32_t> to = block(round, communicator.rank().value, r, factor);
      const std::vector<std::uint32_t> from = block(round, r, communicator.rank().value, factor);
      send.insert(send.end(), to.begin(), to.end());
      expected.insert(expected.end(), from.begin(), from.end());
      send_bytes.push_back(static_cast<std::int64_t>(to.size() * sizeof(std::uint32_t)));
      receive_bytes.push_back(static_cast<std::int64_t>(from.size() * sizeof(std::uint32_t)));
    }
    received.resize(expected.size());
  }
  AllToAll exchange() {
    return {.send = reinterpret_cast<const std::byte*>(send.data()),
            .send_bytes = send_bytes,
            .receive = reinterpret_cast<std::byte*>(received.data()),
            .receive_bytes = receive_bytes};
  }
};

// Values whose sum depends on the order of addition.
inline std::vector<float> addends(int rank, std::size_t n) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const auto step = static_cast<float>((static_cast<std::size_t>(rank) * 7 + i * 13) % 17);
    values[i] = (rank % 2 == 0 ? 1.0F : -1.0F) * (1.0F + step / 3.0F) * (i % 3 == 0 ? 1e6F : 1e-3F * step);
  }
  return values;
}

}  // namespace conformance

TEST_P(CommunicatorConformance, DeliversEveryBlockAndPermitsImmediateReuseOfItsBuffer) {
  run([](Communicator& communicator) {
    for (int round = 0; round < 12; ++round) {
      conformance::Blocks blocks(round, communicator, round == 11 ? 20'000 : 1);
      communicator.exchange(blocks.exchange());
      std::fill(blocks.send.begin(), blocks.send.end(), 0);
      EXPECT_EQ(blocks.received, blocks.expected) << "round " << round << " rank " << communicator.rank().value;
    }
  });
}

// Ranks enter and leave every call at different times. A block contains the data that its sender wrote before the call.
TEST_P(CommunicatorConformance, BlocksHaveTheContentsOfTheirSendersCallIfRanksAreLate) {
  run([](Communicator& communicator) {
    std::minstd_rand random(static_cast<unsigned>(communicator.rank().value + 1));
    const auto dawdle = [&] { std::this_thread::sleep_for(std::chrono::microseconds{random() % 300}); };
    std::vector<float> values(101);
    for (int round = 0; round < 12; ++round) {
      conformance::Blocks blocks(round, communicator, 3);
      const std::vector<std::uint32_t> meant = blocks.send;
      std::fill(blocks.send.begin(), blocks.send.end(), 1);
      dawdle();
      blocks.send = meant;
      communicator.exchange(blocks.exchange());
      std::fill(blocks.send.begin(), blocks.send.end(), 2);
      EXPECT_EQ(blocks.received, blocks.expected) << "round " << round << " rank " << communicator.rank().value;

      dawdle();
      const auto addend = [round](int rank) { return static_cast<float>(10 * round + rank); };
      std::fill(values.begin(), values.end(), addend(communicator.rank().value));
      communicator.all_reduce_sum(values);
      const int n = communicator.num_ranks();
      EXPECT_THAT(values, testing::Each(static_cast<float>(n * 10 * round + n * (n - 1) / 2)));
    }
  });
}

TEST_P(CommunicatorConformance, SumsInRankOrderToTheBit) {
  run([](Communicator& communicator) {
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{1'000}, std::size_t{333}}) {
      std::vector<float> expected = conformance::addends(0, n);
      for (int r = 1; r < communicator.num_ranks(); ++r) {
        const std::vector<float> theirs = conformance::addends(r, n);
        for (std::size_t i = 0; i < n; ++i) expected[i] = expected[i] + theirs[i];
      }
      std::vector<float> values = conformance::addends(communicator.rank().value, n);
      communicator.all_reduce_sum(values);
      EXPECT_EQ(values, expected) << n;
    }
  });
}

TEST_P(CommunicatorConformance, GathersBroadcastsAndSums) {
  run([](Communicator& communicator) {
    const int n = communicator.num_ranks();
    std::vector<int> all(static_cast<std::size_t>(n));
    const int mine = 100 + communicator.rank().value;
    communicator.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    for (int r = 0; r < n; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], 100 + r);

    for (int root = 0; root < n; ++root) {
      std::vector<int> values(10, communicator.rank().value == root ? root + 7 : -1);
      communicator.broadcast(std::as_writable_bytes(std::span(values)), RankId{root});
      EXPECT_THAT(values, testing::Each(root + 7));
    }
    EXPECT_EQ(sum(communicator, std::int64_t{communicator.rank().value + 1}), n * (n + 1) / 2);
    EXPECT_EQ(sum(communicator, 0.5), 0.5 * n);
  });
}

TEST_P(CommunicatorConformance, RankZeroGathersBytesOfAnyLength) {
  run([](Communicator& communicator) {
    const auto of = [](int r) { return std::vector<std::byte>(static_cast<std::size_t>(r % 3) * 100, std::byte(r)); };
    const auto gathered = gather(communicator, of(communicator.rank().value));
    if (communicator.rank() != RankId{0}) {
      EXPECT_TRUE(gathered.empty());
      return;
    }
    ASSERT_EQ(gathered.size(), static_cast<std::size_t>(communicator.num_ranks()));
    for (int r = 0; r < communicator.num_ranks(); ++r) EXPECT_EQ(gathered[static_cast<std::size_t>(r)], of(r));
  });
}

TEST_P(CommunicatorConformance, EveryRankGetsTheSameOutcomeOfEveryBallot) {
  run([](Communicator& communicator) {
    constexpr std::uint64_t kBallots = 60;
    constexpr std::uint64_t kAhead = 8;
    const auto ok = [&](std::uint64_t number, int rank) {
      return (number * 7 + static_cast<std::uint64_t>(rank) * 5) % 11 != 0;
    };
    for (int repeat = 0; repeat < 2; ++repeat) {  // a second ballot does not see the first one's votes
      const std::unique_ptr<Ballot> ballot = communicator.peers().make_ballot();
      for (std::uint64_t number = 0; number < kBallots + kAhead; ++number) {
        if (number < kBallots) ballot->cast(number, ok(number, communicator.rank().value));
        if (number < kAhead) continue;
        bool expected = true;
        for (int r = 0; r < communicator.num_ranks(); ++r) expected = expected && ok(number - kAhead, r);
        std::optional<bool> outcome;
        while (!(outcome = ballot->outcome(number - kAhead))) std::this_thread::yield();
        EXPECT_EQ(*outcome, expected) << number - kAhead;
      }
    }
  });
}

TEST_P(CommunicatorConformance, ABallotHasNoOutcomeBeforeAllHaveVoted) {
  run([](Communicator& communicator) {
    const std::unique_ptr<Ballot> ballot = communicator.peers().make_ballot();
    const bool last = communicator.rank().value == communicator.num_ranks() - 1;
    if (!last) ballot->cast(0, true);
    communicator.barrier();
    EXPECT_FALSE(ballot->outcome(0).has_value());
    communicator.barrier();
    if (last) ballot->cast(0, false);
    std::optional<bool> outcome;
    while (!(outcome = ballot->outcome(0))) std::this_thread::yield();
    EXPECT_FALSE(*outcome);
  });
}

TEST_P(CommunicatorConformance, SizeErrorsNameTheCall) {
  const std::pair<const char*, std::function<void(Communicator&, std::size_t)>> calls[] = {
      {"sum: rank 0",
       [](Communicator& communicator, std::size_t size) {
         std::vector<float> values(size * static_cast<std::size_t>(communicator.num_ranks()));
         communicator.all_reduce_sum(values);
       }},
      {"all-gather: rank 0",
       [](Communicator& communicator, std::size_t size) {
         const std::vector<std::byte> mine(size);
         std::vector<std::byte> all(size * static_cast<std::size_t>(communicator.num_ranks()));
         communicator.all_gather(mine, all);
       }},
      {"broadcast: rank 0", [](Communicator& communicator, std::size_t size) {
         std::vector<std::byte> bytes(size);
         communicator.broadcast(bytes, RankId{0});
       }}};
  for (const auto& [begin, call] : calls) {
    run([&, begin = begin, &call = call](Communicator& communicator) {
      if (communicator.num_ranks() == 1) return;
      std::string error;
      try {
        call(communicator, communicator.rank() == RankId{0} ? 8 : 4);
      } catch (const PhaseFailed& e) {
        error = e.what();
      } catch (const PeerFailed&) {
        EXPECT_EQ(communicator.rank(), RankId{0});
      }
      if (communicator.rank() == RankId{0}) return;
      EXPECT_THAT(error, testing::StartsWith(begin));
    });
  }
}

TEST_P(CommunicatorConformance, BlocksOfUnexpectedSizeAreAnErrorThatNamesBothRanks) {
  // Sent and expected sizes: they differ by little or much, or one is zero.
  const std::pair<std::int64_t, std::int64_t> sizes[] = {{8, 4}, {4, 8},         {0, 4},
                                                         {4, 0}, {1'000'000, 4}, {4, 1'000'000}};
  for (const auto& [sent, expected] : sizes) {
    run([&, sent = sent, expected = expected](Communicator& communicator) {
      const auto n = static_cast<std::size_t>(communicator.num_ranks());
      if (n == 1) return;
      const int me = communicator.rank().value;
      const int last = communicator.num_ranks() - 1;
      std::vector<std::int64_t> send_bytes(n, 16);
      std::vector<std::int64_t> receive_bytes(n, 16);
      if (me == 0) send_bytes[n - 1] = sent;
      if (me == last) receive_bytes[0] = expected;
      const auto total = [](const auto& bytes) {
        return static_cast<std::size_t>(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}));
      };
      const std::vector<std::byte> send(total(send_bytes));
      std::vector<std::byte> receive(total(receive_bytes));
      std::string error;
      try {
        communicator.exchange({send.data(), send_bytes, receive.data(), receive_bytes});
      } catch (const PhaseFailed& e) {
        error = e.what();
      } catch (const PeerFailed&) {
        EXPECT_NE(me, last);
      }
      if (me != last) return;
      EXPECT_THAT(error,
                  testing::AllOf(testing::HasSubstr("rank 0"), testing::HasSubstr("rank " + std::to_string(last))));
    });
  }
}

TEST_P(CommunicatorConformance, AMissingRankTimesOut) {
  run({.timeout = std::chrono::milliseconds{300}}, [](Communicator& communicator) {
    if (communicator.rank().value == communicator.num_ranks() - 1) return;
    EXPECT_THROW(communicator.barrier(), PeerFailed);
  });
}

TEST_P(CommunicatorConformance, SharedMemoryIsVisibleToTheRanksOfItsNode) {
  run({.ranks_per_node = 2}, [](Communicator& communicator) {
    const auto n = static_cast<std::size_t>(communicator.num_ranks());
    const auto content = [](int rank, std::size_t region) {
      return std::byte(10 * rank + static_cast<int>(region) + 1);
    };
    std::vector<SharedMemory> memories;
    std::vector<SharedRegion> regions;
    for (std::size_t i = 0; i < 2; ++i) {
      memories.push_back(SharedMemory::create("conformance", Bytes{1'000}));
      memories.back().bytes()[900] = content(communicator.rank().value, i);
      regions.push_back({memories.back().bytes(), memories.back().name()});
    }
    communicator.peers().share(regions);
    const std::byte* const mine[] = {memories[0].bytes().data() + 900, memories[1].bytes().data() + 900};
    std::vector<const std::byte*> theirs(2 * n);
    communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(theirs)));
    for (int r = 0; r < communicator.num_ranks(); ++r) {
      for (std::size_t i = 0; i < 2; ++i) {
        const std::byte* here = communicator.peers().local(RankId{r}, theirs[2 * static_cast<std::size_t>(r) + i]);
        EXPECT_TRUE(here != nullptr || !communicator.topology().same_node(communicator.rank(), RankId{r}));
        if (here == nullptr) continue;
        EXPECT_EQ(*here, content(r, i)) << "of rank " << r;
      }
    }
    communicator.peers().share({});
  });
}

}  // namespace foremoe
