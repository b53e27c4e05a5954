// Overhead of the engine's paths over a plain memcpy, from submit() to the end of wait(). Copies uncached experts of
// 9.4 MB (three float32 matrices of 2048 × 384) over the host path (arena, checksums verified) and over the peer path.
// The argument is the number of experts fetched per turn. With 16, the benchmark measures a path's rate; with 1, it
// includes the wake-up time of two threads.
//
// Estimator: Plain copies and copies through the engine alternate turn by turn on the same buffers, so that other load
// on the machine affects both. Both traverse one gigabyte before they copy the same expert again. The reported ratio is
// the median time of the engine ÷ that of memcpy; 1 means the speed of memcpy.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "foremoe/transfer/copy_link.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {
namespace {

constexpr int kExperts = 96;  // 0.9 GB each for homes and buffers; must be a multiple of the arguments
constexpr int kRounds = 4;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// One rank and one layer. Every expert has its own buffer.
TransferSchedule some_per_turn(Path path, int per_turn) {
  TransferSchedule schedule;
  schedule.depth = 1;
  for (int e = 0; e < kExperts; ++e) {
    const TurnId turn{e / per_turn};
    if (e % per_turn == 0) {
      schedule.order.turns.push_back({.event = EventId{turn.value}, .micro_step = MicroStepId{turn.value}});
      schedule.first_of_turn.push_back(static_cast<std::size_t>(e));
    }
    schedule.copies.push_back({.expert = ExpertId{e},
                               .slot = SlotId{e % per_turn},
                               .buffer = e,
                               .opens = turn,
                               .arrives = turn,
                               .closes = turn,
                               .path = path});
  }
  schedule.first_of_turn.insert(schedule.first_of_turn.end(), 2, kExperts);
  schedule.arena.resize(1);
  for (int e = 0; e < kExperts; ++e) schedule.arena[0].push_back({LayerId{0}, ExpertId{e}});
  schedule.buffers_per_rank = kExperts;
  return schedule;
}

class Directory final : public ExpertDirectory {
 public:
  explicit Directory(const ExpertLayout& layout) {
    const auto bytes = static_cast<std::size_t>(layout.bytes().value);
    const auto lay = [&](std::vector<std::byte>& memory, auto& segments, std::byte fill) {
      memory.assign(kExperts * bytes + kLine, fill);
      std::byte* const first = memory.data() + (kLine - reinterpret_cast<std::uintptr_t>(memory.data()) % kLine);
      for (std::size_t e = 0; e < kExperts; ++e) {
        for (std::size_t s = 0; s < layout.num_segments(); ++s) {
          segments.push_back(first + e * bytes + layout.offset(s));
        }
      }
    };
    segments_ = layout.num_segments();
    lay(home_memory_, homes_, std::byte{1});
    lay(buffer_memory_, buffers_, std::byte{2});
  }
  std::span<std::byte* const> buffer(int b) const override {
    return std::span(buffers_).subspan(static_cast<std::size_t>(b) * segments_, segments_);
  }
  std::span<const std::byte* const> source(const ScheduledCopy& copy) const override { return home(copy.expert); }
  std::uint64_t published(RankId) const override { return 1; }
  void put_in_place(TurnId) override {}
  bool in_place(RankId, TurnId) const override { return true; }

  std::span<const std::byte* const> home(ExpertId e) const {
    return std::span(homes_).subspan(e.index() * segments_, segments_);
  }

 private:
  static constexpr std::size_t kLine = 64;
  std::size_t segments_ = 0;
  std::vector<std::byte> home_memory_, buffer_memory_;
  std::vector<const std::byte*> homes_;
  std::vector<std::byte*> buffers_;
};

class Alone final : public Ballot {
 public:
  void cast(std::uint64_t, bool ok) override { ok_ = ok; }
  std::optional<bool> outcome(std::uint64_t) override { return ok_; }

 private:
  bool ok_ = false;
};

double median(std::vector<double>& values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

void engine_over_memcpy(benchmark::State& state, Path path) {
  const ExpertLayout layout = swiglu_layout(2048, 384);
  const int per_turn = static_cast<int>(state.range(0));
  const int turns = kExperts / per_turn;
  const TransferSchedule schedule = some_per_turn(path, per_turn);
  Directory directory(layout);
  HostArena arena = HostArena::create(schedule.arena[0], layout);
  for (int e = 0; e < kExperts; ++e) arena.publish(e, 1, directory.home(ExpertId{e}));
  const auto source = [&](int e, std::size_t s) {
    return path == Path::kHost ? arena.segment(e, s) : directory.home(ExpertId{e})[s];
  };
  std::vector<double> bare;
  std::vector<double> through_engine;
  const auto copy_bare = [&](int turn) {
    const auto begin = Clock::now();
    for (int e = turn * per_turn; e < (turn + 1) * per_turn; ++e) {
      for (std::size_t s = 0; s < layout.num_segments(); ++s) {
        std::memcpy(directory.buffer(e)[s], source(e, s), static_cast<std::size_t>(layout.segments()[s].bytes().value));
      }
    }
    bare.push_back(seconds_since(begin));
  };
  for (auto _ : state) {
    for (int round = 0; round < kRounds; ++round) {
      ExpertTransferEngine engine({.schedule = schedule,
                                   .layout = layout,
                                   .rank = RankId{0},
                                   .directory = directory,
                                   .arena = &arena,
                                   .host = std::make_unique<MemcpyLink>(),
                                   .peer = std::make_unique<MemcpyLink>(),
                                   .ballot = std::make_unique<Alone>()},
                                  {.eager = false});
      for (int t = 0; t < turns; ++t) {
        copy_bare((t + turns / 2) % turns);
        const auto begin = Clock::now();
        engine.submit(TurnId{t});
        if (!engine.wait(TurnId{t})) state.SkipWithError("a copy failed");
        through_engine.push_back(seconds_since(begin));
        engine.release(TurnId{t});
      }
      engine.finish();
    }
  }
  const auto gigabytes = static_cast<double>(layout.bytes().value * per_turn) * 1e-9;
  const double bare_rate = gigabytes / median(bare);
  const double engine_rate = gigabytes / median(through_engine);
  state.counters["memcpy_GB/s"] = bare_rate;
  state.counters["engine_GB/s"] = engine_rate;
  state.counters["ratio"] = engine_rate / bare_rate;
}

BENCHMARK_CAPTURE(engine_over_memcpy, host_path, Path::kHost)
    ->Arg(16)
    ->Arg(1)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(engine_over_memcpy, peer_path, Path::kPeer)
    ->Arg(16)
    ->Arg(1)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace foremoe
