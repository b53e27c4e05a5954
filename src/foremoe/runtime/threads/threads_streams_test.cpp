// Ranks whose streams do their work later: nothing waits on the host, so every order must come from events.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "foremoe/runtime/threads/late_device.h"
#include "foremoe/runtime/threads/run_ranks.h"
#include "foremoe/runtime/threads/threads_communicator.h"

namespace foremoe {
namespace {

constexpr int kRanks = 4;
constexpr int kRounds = 12;

void run_late(const std::function<void(Communicator&, LateStream&)>& body) {
  std::vector<std::unique_ptr<LateDevice>> devices;
  std::vector<Device*> pointers;
  for (unsigned r = 0; r < kRanks; ++r) {
    devices.push_back(std::make_unique<LateDevice>(r + 1));
    pointers.push_back(devices.back().get());
  }
  const auto communicators =
      make_threads_communicators({.num_ranks = kRanks, .ranks_per_node = kRanks}, pointers, std::chrono::seconds{60});
  run_ranks(kRanks, [&](RankId rank) {
    LateStream& stream = devices[rank.index()]->stream();
    body(*communicators[rank.index()], stream);
    stream.synchronize();
  });
}

TEST(ThreadsStreams, BlocksAreReadAfterTheyWereWrittenAndBeforeTheyAreOverwritten) {
  run_late([](Communicator& communicator, LateStream& stream) {
    constexpr std::size_t kWords = 50;  // of a block; rank r sends none to rank r + 1
    const int me = communicator.rank().value;
    const auto bytes = [&](int from, int to) {
      return static_cast<std::int64_t>(to == (from + 1) % kRanks ? 0 : kWords * sizeof(int));
    };
    std::vector<std::int64_t> send_bytes;
    std::vector<std::int64_t> receive_bytes;
    for (int r = 0; r < kRanks; ++r) {
      send_bytes.push_back(bytes(me, r));
      receive_bytes.push_back(bytes(r, me));
    }
    std::vector<int> send((kRanks - 1) * kWords);
    std::vector<int> receive(send.size());
    for (int round = 0; round < kRounds; ++round) {
      stream.enqueue([&, round] { std::fill(send.begin(), send.end(), 100 * round + me); });
      communicator.all_to_all_v({.send = reinterpret_cast<const std::byte*>(send.data()),
                                 .send_bytes = send_bytes,
                                 .receive = reinterpret_cast<std::byte*>(receive.data()),
                                 .receive_bytes = receive_bytes},
                                stream);
      stream.enqueue([&, round] {
        std::fill(send.begin(), send.end(), -1);
        std::size_t i = 0;
        for (int r = 0; r < kRanks; ++r) {
          for (std::int64_t word = 0; word < bytes(r, me) / 4; ++word) EXPECT_EQ(receive[i++], 100 * round + r);
        }
      });
    }
    stream.synchronize();
  });
}

TEST(ThreadsStreams, SumsAreOfWhatEveryStreamHadWrittenByThen) {
  run_late([](Communicator& communicator, LateStream& stream) {
    std::vector<float> values(101);
    for (int round = 0; round < kRounds; ++round) {
      const std::size_t n = round % 2 == 0 ? 101 : 30;
      const auto addend = [round](int rank) { return static_cast<float>(10 * round + rank); };
      stream.enqueue([&, addend] { std::fill(values.begin(), values.end(), addend(communicator.rank().value)); });
      communicator.all_reduce_sum(std::span(values).first(n), stream);
      stream.enqueue([&, n, round] {
        const auto sum = static_cast<float>(kRanks * 10 * round + kRanks * (kRanks - 1) / 2);
        for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(values[i], sum);
      });
    }
    stream.synchronize();
  });
}

TEST(ThreadsStreams, MemoryOfARankThatFailsIsNotReadAfterItHasLeft) {
  for (int repeat = 0; repeat < 8; ++repeat) {
    run_late([&](Communicator& communicator, LateStream& stream) {
      const std::vector<std::int64_t> bytes(kRanks, 4'000);
      for (int round = 0; round < 6; ++round) {
        const std::vector<std::byte> send(kRanks * 4'000);
        std::vector<std::byte> receive(send.size());
        const bool fails = round == 3 && communicator.rank().value == repeat % kRanks;
        try {
          if (fails) communicator.give_up("test");
          communicator.all_to_all_v({send.data(), bytes, receive.data(), bytes}, stream);
          stream.synchronize();
        } catch (const PeerFailed&) {
          return;
        }
      }
    });
  }
}

}  // namespace
}  // namespace foremoe
