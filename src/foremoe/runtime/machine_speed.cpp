#include "foremoe/runtime/machine_speed.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <numeric>
#include <vector>

#include "foremoe/runtime/threads/run_ranks.h"
#include "foremoe/runtime/threads/threads_communicator.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {
namespace {

constexpr int kLeastRepeats = 5;
constexpr int kMostRepeats = 100'000;
constexpr std::size_t kFewBytes = 64;
constexpr std::chrono::milliseconds kTimeout{60'000};

struct Repetitions {
  double best = 0;  // seconds, as all
  double median = 0;
  double mean = 0;
};

// One rank's part of every measure.
class RankProbe {
 public:
  RankProbe(const SpeedOptions& options, Device& device, Communicator& communicator, const SharedMemory& shared)
      : options_{options}, device_{device}, communicator_{communicator}, shared_{shared} {}

  MachineSpeed measure() {
    MachineSpeed speed;
    measure_products(speed);
    measure_memory(speed);
    measure_exchange(speed);
    measure_copies(speed);
    return speed;
  }

 private:
  // All ranks begin together. How often is agreed beforehand, from a first repetition that warms up, for operations may
  // be collective.
  template <class Operation>
  Repetitions repeat(Operation&& operation) {
    const auto timed = [&] {
      const auto begin = std::chrono::steady_clock::now();
      operation();
      device_.stream().synchronize();
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
    const auto floats = [&](std::int64_t n) { return device_.allocate(Bytes{n * std::int64_t{sizeof(float)}}); };
    const DeviceMemory gate_up_weights = floats(2 * intermediate * hidden);
    const DeviceMemory down_weights = floats(hidden * intermediate);
    const DeviceMemory x = floats(rows * hidden);
    const DeviceMemory gate_up = floats(rows * 2 * intermediate);
    const DeviceMemory y = floats(rows * hidden);
    for (const DeviceMemory* m : {&gate_up_weights, &down_weights, &x}) fill(*m);
    const ExpertRows expert{.rows = rows, .gate_up = gate_up_weights.floats(), .down = down_weights.floats()};
    device_.reserve_rows(rows, options_.shape);
    const Repetitions forward = repeat([&] {
      device_.experts_forward({&expert, 1}, options_.shape, x.floats(), gate_up.floats(), y.floats());
    });
    const double flops = 6.0 * static_cast<double>(rows * hidden * intermediate);
    speed.best_flops_per_second = flops / forward.best;
    speed.expert_flops_per_second = flops / forward.mean;
    const Repetitions one = repeat([&] { device_.add(y.floats(), x.floats(), 1); });
    speed.operation_seconds = one.median;
  }

  void measure_memory(MachineSpeed& speed) {
    const DeviceMemory from = device_.allocate(options_.buffer);
    const DeviceMemory to = device_.allocate(options_.buffer);
    fill(from);
    const auto bytes = static_cast<std::size_t>(options_.buffer.value);
    const Repetitions moved = repeat([&] { device_.copy(to.data(), from.data(), bytes); });
    speed.moved_bytes_per_second = 2 * static_cast<double>(bytes) / moved.mean;
  }

  // Equal blocks to every rank but itself.
  Repetitions repeat_exchange(std::int64_t block) {
    const int n = communicator_.num_ranks();
    std::vector<std::int64_t> blocks(static_cast<std::size_t>(n), block);
    blocks[communicator_.rank().index()] = 0;
    const DeviceMemory send = device_.allocate(Bytes{block * n});
    const DeviceMemory receive = device_.allocate(Bytes{block * n});
    fill(send);
    const AllToAll exchange{
        .send = send.data(), .send_bytes = blocks, .receive = receive.data(), .receive_bytes = blocks};
    const Repetitions exchanged = repeat([&] { communicator_.all_to_all_v(exchange, device_.stream()); });
    communicator_.barrier();  // what others still read is not given back
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
    const auto link = device_.make_copy_link();
    const DeviceMemory to = device_.allocate(options_.buffer);
    std::int64_t number = 0;
    const auto copy = [&](std::size_t bytes) {
      const Chunk chunk{.from = shared_.bytes().data(), .to = to.data(), .bytes = bytes};
      const CopyId id{++number};
      link->submit({.id = id, .chunks = {&chunk, 1}});
      while (link->poll(id) == CopyState::kUnderWay) link->progress();
    };
    const auto all = static_cast<std::size_t>(options_.buffer.value);
    speed.copied_bytes_per_second = static_cast<double>(all) / repeat([&] { copy(all); }).mean;
    speed.copy_seconds = repeat([&] { copy(kFewBytes); }).median;
  }

  // Touched pages, and numbers that no processor is slow with.
  void fill(const DeviceMemory& memory) {
    const std::array<float, 16> ones = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const auto pattern = std::as_bytes(std::span(ones));
    const auto bytes = static_cast<std::size_t>(memory.bytes().value);
    std::vector<std::byte> host(bytes);
    for (std::size_t at = 0; at < bytes; at += pattern.size()) {
      std::memcpy(host.data() + at, pattern.data(), std::min(pattern.size(), bytes - at));
    }
    device_.upload(memory.data(), host);
  }

  const SpeedOptions& options_;
  Device& device_;
  Communicator& communicator_;
  const SharedMemory& shared_;
};

// Of the ranks; what is the time of one operation is averaged as a time.
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

MachineSpeed measure_machine(const SpeedOptions& options, const std::function<std::unique_ptr<Device>()>& make_device) {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Device*> pointers;
  for (int r = 0; r < options.num_ranks; ++r) {
    devices.push_back(make_device());
    pointers.push_back(devices.back().get());
  }
  const auto communicators = make_threads_communicators(
      {.num_ranks = options.num_ranks, .ranks_per_node = options.num_ranks}, pointers, kTimeout);
  const SharedMemory shared = SharedMemory::create("calibrate", options.buffer);
  std::fill(shared.bytes().begin(), shared.bytes().end(), std::byte{1});
  std::vector<MachineSpeed> ranks(devices.size());
  run_ranks(options.num_ranks, [&](RankId r) {
    Communicator& communicator = *communicators[r.index()];
    try {
      ranks[r.index()] = RankProbe(options, *pointers[r.index()], communicator, shared).measure();
    } catch (const std::exception& error) {
      communicator.give_up(error.what());
      throw;
    }
  });
  return mean_of(ranks);
}

}  // namespace foremoe
