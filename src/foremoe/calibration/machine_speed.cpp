#include "foremoe/calibration/machine_speed.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "foremoe/runtime/cpu/optimizers.h"
#include "foremoe/runtime/memory.h"
#include "foremoe/runtime/threads/threads_communicator.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {
namespace {

constexpr int kLeastRepeats = 5;
constexpr int kMostRepeats = 100'000;
constexpr std::size_t kFewBytes = 64;
constexpr std::chrono::milliseconds kTimeout{60'000};

struct Repetitions {
  double best = 0;  // all in seconds
  double median = 0;
  double mean = 0;
};

// Runs every measurement on one rank.
class RankProbe {
 public:
  RankProbe(const SpeedOptions& options, Communicator& communicator, const SharedMemory& shared)
      : options_{options}, communicator_{communicator}, shared_{shared} {}

  MachineSpeed measure() {
    MachineSpeed speed;
    measure_products(speed);
    measure_memory(speed);
    measure_exchange(speed);
    measure_copies(speed);
    return speed;
  }

 private:
  // All ranks begin together. After a warm-up, they time one operation. All ranks use the same number of repetitions,
  // since operations may be collective.
  template <class Operation>
  Repetitions repeat(Operation&& operation) {
    const auto timed = [&] {
      const auto begin = std::chrono::steady_clock::now();
      operation();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    timed();
    const double once = sum(communicator_, timed()) / communicator_.num_ranks();
    const int n =
        static_cast<int>(std::clamp<double>(options_.seconds / std::max(once, 1e-9), kLeastRepeats, kMostRepeats));
    std::vector<double> seconds(static_cast<std::size_t>(n));
    communicator_.barrier();
    for (double& s : seconds) s = timed();
    communicator_.barrier();
    std::sort(seconds.begin(), seconds.end());
    return {.best = seconds.front(),
            .median = seconds[seconds.size() / 2],
            .mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / n};
  }

  void measure_products(MachineSpeed& speed) {
    const std::int64_t hidden = options_.shape.hidden;
    const std::int64_t intermediate = options_.shape.intermediate;
    const std::int64_t rows = options_.rows;
    const auto floats = [&](std::int64_t n) { return allocate_memory(Bytes{n * std::int64_t{sizeof(float)}}); };
    const Memory gate_up_weights = floats(2 * intermediate * hidden);
    const Memory down_weights = floats(hidden * intermediate);
    const Memory x = floats(rows * hidden);
    const Memory gate_up = floats(rows * 2 * intermediate);
    const Memory y = floats(rows * hidden);
    for (const Memory* m : {&gate_up_weights, &down_weights, &x}) fill(*m);
    const cpu::ExpertRows expert{.rows = rows, .gate_up = gate_up_weights.floats(), .down = down_weights.floats()};
    cpu::ExpertsWorkspace workspace(options_.shape);
    const Repetitions forward = repeat([&] {
      cpu::experts_forward({&expert, 1}, {.x = x.floats(), .gate_up = gate_up.floats(), .y = y.floats()}, workspace);
    });
    const double flops = 6.0 * static_cast<double>(rows * hidden * intermediate);
    speed.best_flops_per_second = flops / forward.best;
    speed.expert_flops_per_second = flops / forward.mean;
    const Repetitions one = repeat([&] { cpu::add({y.floats(), 1}, x.floats()); });
    speed.operation_seconds = one.median;
  }

  void measure_memory(MachineSpeed& speed) {
    const Memory from = allocate_memory(options_.buffer);
    const Memory to = allocate_memory(options_.buffer);
    fill(from);
    const auto bytes = static_cast<std::size_t>(options_.buffer.value);
    const Repetitions moved = repeat([&] { std::memcpy(to.data(), from.data(), bytes); });
    speed.moved_bytes_per_second = 2 * static_cast<double>(bytes) / moved.mean;
  }

  // Exchanges equal blocks with every other rank.
  Repetitions repeat_exchange(std::int64_t block) {
    const int n = communicator_.num_ranks();
    std::vector<std::int64_t> blocks(static_cast<std::size_t>(n), block);
    blocks[communicator_.rank().index()] = 0;
    const Memory send = allocate_memory(Bytes{block * n});
    const Memory receive = allocate_memory(Bytes{block * n});
    fill(send);
    const AllToAll exchange{
        .send = send.data(), .send_bytes = blocks, .receive = receive.data(), .receive_bytes = blocks};
    const Repetitions exchanged = repeat([&] { communicator_.exchange(exchange); });
    communicator_.barrier();  // other ranks may still read these buffers
    return exchanged;
  }

  void measure_exchange(MachineSpeed& speed) {
    const int peers = communicator_.num_ranks() - 1;
    if (peers == 0) return;
    const std::int64_t block = std::max<std::int64_t>(1, options_.buffer.value / peers);
    speed.exchange_bytes_per_second = static_cast<double>(block * peers) / repeat_exchange(block).mean;
    speed.exchange_seconds = repeat_exchange(kFewBytes).median;
  }

  void measure_copies(MachineSpeed& speed) {
    MemcpyLink link;
    const Memory to = allocate_memory(options_.buffer);
    std::int64_t number = 0;
    const auto copy = [&](std::size_t bytes) {
      const Chunk chunk{.from = shared_.bytes().data(), .to = to.data(), .bytes = bytes};
      const CopyId id{++number};
      link.submit({.id = id, .chunks = {&chunk, 1}});
      while (link.poll(id) == CopyState::kUnderWay) link.progress();
    };
    const auto all = static_cast<std::size_t>(options_.buffer.value);
    speed.copied_bytes_per_second = static_cast<double>(all) / repeat([&] { copy(all); }).mean;
    speed.copy_seconds = repeat([&] { copy(kFewBytes); }).median;
  }

  // Touches all pages. The values are normal numbers, since some processors are slow with subnormal ones.
  void fill(const Memory& memory) {
    const std::array<float, 16> ones = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const auto pattern = std::as_bytes(std::span(ones));
    const auto bytes = static_cast<std::size_t>(memory.bytes().value);
    for (std::size_t at = 0; at < bytes; at += pattern.size()) {
      std::memcpy(memory.data() + at, pattern.data(), std::min(pattern.size(), bytes - at));
    }
  }

  const SpeedOptions& options_;
  Communicator& communicator_;
  const SharedMemory& shared_;
};

// Returns the mean of every rate and of every time over ranks.
MachineSpeed mean_of(const std::vector<MachineSpeed>& ranks) {
  MachineSpeed mean;
  const auto n = static_cast<double>(ranks.size());
  for (const auto member : {&MachineSpeed::best_flops_per_second, &MachineSpeed::expert_flops_per_second,
                            &MachineSpeed::moved_bytes_per_second, &MachineSpeed::operation_seconds,
                            &MachineSpeed::exchange_bytes_per_second, &MachineSpeed::exchange_seconds,
                            &MachineSpeed::copied_bytes_per_second, &MachineSpeed::copy_seconds}) {
    for (const MachineSpeed& rank : ranks) mean.*member += rank.*member / n;
  }
  return mean;
}

}  // namespace

MachineSpeed measure_machine(const SpeedOptions& options) {
  const auto communicators =
      make_threads_communicators({.num_ranks = options.num_ranks, .ranks_per_node = options.num_ranks}, kTimeout);
  const SharedMemory shared = SharedMemory::create("calibrate", options.buffer);
  std::fill(shared.bytes().begin(), shared.bytes().end(), std::byte{1});
  std::vector<MachineSpeed> ranks(communicators.size());
  run_ranks(options.num_ranks, [&](RankId r) {
    Communicator& communicator = *communicators[r.index()];
    try {
      ranks[r.index()] = RankProbe(options, communicator, shared).measure();
    } catch (const std::exception& error) {
      communicator.give_up(error.what());
      throw;
    }
  });
  return mean_of(ranks);
}

namespace {

Bytes memory_of_machine() { return Bytes{std::int64_t{sysconf(_SC_PHYS_PAGES)} * std::int64_t{sysconf(_SC_PAGESIZE)}}; }

// Rounds to four digits, which is more precise than the measurements.
void round_numbers(Cluster& cluster) {
  for (double* const number :
       {&cluster.flops_per_second, &cluster.gemm_efficiency, &cluster.attention_efficiency,
        &cluster.memory_bytes_per_second, &cluster.kernel_seconds, &cluster.peers.bytes_per_second,
        &cluster.peers.latency_seconds, &cluster.network.bytes_per_second, &cluster.network.latency_seconds,
        &cluster.host.bytes_per_second, &cluster.host.latency_seconds, &cluster.switch_bytes_per_second,
        &cluster.host_memory_bytes_per_second}) {
    *number = std::stod(fmt::format("{:.4g}", *number));
  }
}

}  // namespace

Calibration calibrate(const std::string& name, SpeedOptions options) {
  const bool asked = options.num_ranks > 0;
  if (!asked) options.num_ranks = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const MachineSpeed speed = measure_machine(options);

  const int n = options.num_ranks;
  const bool alone = n == 1;
  const std::string at_once = alone ? "one rank" : fmt::format("{} ranks at once", n);
  const std::string buffers = fmt::format("{} MiB", options.buffer.value >> 20);
  Calibration result;
  Cluster& c = result.cluster;
  c.name = name;
  c.ranks_per_node = n;
  c.flops_per_second = speed.best_flops_per_second;
  c.gemm_efficiency = std::min(1.0, speed.expert_flops_per_second / speed.best_flops_per_second);
  c.attention_efficiency = c.gemm_efficiency;
  c.memory_bytes_per_second = speed.moved_bytes_per_second;
  c.memory = Bytes{memory_of_machine().value / n};
  c.row_tile = 1;
  c.kernel_seconds = speed.operation_seconds;
  c.host = {.bytes_per_second = speed.copied_bytes_per_second, .latency_seconds = speed.copy_seconds};
  c.peers =
      alone ? c.host
            : LinkSpeed{.bytes_per_second = speed.exchange_bytes_per_second, .latency_seconds = speed.exchange_seconds};
  c.network = c.peers;
  c.ranks_per_switch = n;
  c.switch_bytes_per_second = n * c.host.bytes_per_second;
  c.host_memory_bytes_per_second = n * c.memory_bytes_per_second;

  round_numbers(c);

  const std::string network = "assumed: no other node was there to measure; as between peers";
  result.notes = {
      {"ranks_per_node", asked ? "as asked for" : "the processors of this machine"},
      {"device.flops_per_second",
       fmt::format("measured, {}: the fastest forward of an expert of {} by {} with {} rows, float32", at_once,
                   options.shape.hidden, options.shape.intermediate, options.rows)},
      {"device.gemm_efficiency", "measured: all of these forwards by the fastest"},
      {"device.attention_efficiency", "assumed: as products; foremoe run computes no attention"},
      {"device.memory_bytes_per_second",
       fmt::format("measured, {}: memcpy of {}, bytes read and written", at_once, buffers)},
      {"device.memory_bytes", "this machine's memory by ranks"},
      {"device.row_tile", "assumed: a processor multiplies single rows"},
      {"device.kernel_seconds", fmt::format("measured, {}: an addition of one element", at_once)},
      {"peers.bytes_per_second", alone ? "assumed: one rank has no peers; as from the host's memory"
                                       : fmt::format("measured, {}: an all-to-all of {} each", at_once, buffers)},
      {"peers.latency_seconds",
       alone ? "likewise" : fmt::format("measured, {}: an all-to-all of 64 bytes to each", at_once)},
      {"network.bytes_per_second", network},
      {"network.latency_seconds", network},
      {"host.bytes_per_second",
       fmt::format("measured, {}: a transfer link copies {} from shared memory", at_once, buffers)},
      {"host.latency_seconds", fmt::format("measured, {}: a transfer link copies 64 bytes", at_once)},
      {"exchange.token_efficiency", "peers.bytes_per_second is already that of an all-to-all"},
      {"exchange.forwarding_efficiency", "likewise"},
      {"exchange.row_efficiency", "likewise"},
      {"exchange.token_seconds", "peers.latency_seconds is already that of an all-to-all"},
      {"node.ranks_per_switch", "all: they share one memory"},
      {"node.switch_bytes_per_second", "host.bytes_per_second of all ranks, which were measured at once"},
      {"node.host_memory_bytes_per_second", "device.memory_bytes_per_second of all ranks, likewise"},
  };
  return result;
}

}  // namespace foremoe
