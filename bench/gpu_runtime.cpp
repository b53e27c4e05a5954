// What copies cost a GPU, and what they do not. Prints a table; exits with 77 and one line where there is no GPU.
//
//   gpu_runtime [repeats]
//
// Shapes are those of Qwen3-30B-A3B's experts stored in bf16 (9.4 MB a copy): hidden 2048, intermediate 768. Times are
// the device's, by events, the median over the repeats; with and without copies alternate in one run, and their ratio
// is what counts. Two ranks share the GPU, as threads would: a peer copy is from the other rank's memory.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "foremoe/runtime/cuda/cuda_device.h"
#include "foremoe/runtime/cuda/measure/gpu_load.h"

namespace {

using namespace foremoe;

constexpr ExpertShape kShape{.hidden = 2048, .intermediate = 768};
constexpr int kExperts = 16, kTopK = 8;
constexpr std::int64_t kTokens = 2048, kRows = kTokens * kTopK;
constexpr std::size_t kExpertFloats = 3 * 2048 * 768;
constexpr std::size_t kCopyBytes = kExpertFloats * 2;  // 9.4 MB: an expert in bf16
constexpr double kAttentionSeconds = 2e-3;
constexpr int kCopiesPerLayer = 2;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Bytes floats(std::size_t n) { return Bytes{n * sizeof(float)}; }

// A layer's device work on one rank: dispatch (gather), experts, and combine; the all-to-all within one GPU is copies.
class Layer {
 public:
  explicit Layer(Device& device) : device_(device) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      token_of_row_.push_back(static_cast<std::int32_t>(i * 7919 % kTokens));
      row_of_entry_.push_back(static_cast<std::int32_t>(i * 7919 % kRows));
    }
    for (std::size_t e = 0; e < kExperts; ++e) {
      const float* weights = weights_.floats() + e * kExpertFloats;
      experts_.push_back({.first_row = static_cast<std::int64_t>(e) * (kRows / kExperts),
                          .rows = kRows / kExperts,
                          .gate_up = weights,
                          .down = weights + std::size_t{2} * 2048 * 768});
    }
    device_.reserve_rows(kRows, kShape);
  }
  void dispatch() {
    device_.gather_rows(rows_.floats(), x_.floats(), token_of_row_, kShape.hidden);
    device_.copy(received_.data(), rows_.data(), static_cast<std::size_t>(rows_.bytes().value));
  }
  void gemm() { device_.experts_forward(experts_, kShape, received_.floats(), gate_up_.floats(), rows_.floats()); }
  void enqueue() {
    dispatch();
    gemm();
    device_.combine(y_.floats(), rows_.floats(), weight_.floats(), row_of_entry_, kTopK, kShape.hidden);
  }

 private:
  DeviceMemory matrix(std::int64_t rows, int width) {
    return device_.allocate(floats(static_cast<std::size_t>(rows * width)));
  }

  Device& device_;
  DeviceMemory weights_ = device_.allocate(floats(kExperts * kExpertFloats));
  DeviceMemory x_ = matrix(kTokens, kShape.hidden), y_ = matrix(kTokens, kShape.hidden);
  DeviceMemory rows_ = matrix(kRows, kShape.hidden), received_ = matrix(kRows, kShape.hidden);
  DeviceMemory gate_up_ = matrix(kRows, 2 * kShape.intermediate), weight_ = matrix(kRows, 1);
  std::vector<std::int32_t> token_of_row_, row_of_entry_;
  std::vector<ExpertRows> experts_;
};

// Copies of experts in flight on a link, and how to wait for them.
class Copies {
 public:
  Copies(Device& device, const std::byte* from)
      : link_(device.make_copy_link()), to_(device.allocate(Bytes{kCopyBytes})) {
    chunk_ = {.from = from, .to = to_.data(), .bytes = kCopyBytes};
  }
  void submit(int n) {
    for (int i = 0; i < n; ++i) {
      pending_.push_back(CopyId{next_++});
      link_->submit({.id = pending_.back(), .chunks = {&chunk_, 1}});
    }
  }
  bool done() {
    std::erase_if(pending_, [&](CopyId id) { return link_->poll(id) != CopyState::kUnderWay; });
    return pending_.empty();
  }
  void finish() {
    while (!done()) {
    }
  }

 private:
  std::unique_ptr<CopyLink> link_;
  DeviceMemory to_;
  Chunk chunk_;
  std::vector<CopyId> pending_;
  int next_ = 0;
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class Table {
 public:
  void add(const std::string& what, const std::string& value, const std::string& aim) {
    fmt::print("| {} | {} | {} |\n", what, value, aim);
  }
};

void slowdown(Table& table, Device& device, const std::string& name, const std::function<void()>& work, Copies& copies,
              int repeats) {
  cuda::DeviceStopwatch watch(device.stream());
  std::vector<double> alone, beside;
  const auto time = [&] {
    watch.begin();
    work();
    watch.end();
    return watch.seconds();
  };
  time();
  for (int i = 0; i < repeats; ++i) {
    alone.push_back(time());
    copies.submit(8);  // more than the work takes
    beside.push_back(time());
    copies.finish();
  }
  table.add(name + " under copies ÷ without",
            fmt::format("{:.4f} ({:.0f} ÷ {:.0f} µs)", median(beside) / median(alone), median(beside) * 1e6,
                        median(alone) * 1e6),
            "≤ 1.02");
}

// How long copies that start with the attention are still under way when it has ended.
void exposed(Table& table, Device& device, const std::string& name, Copies& copies, int repeats) {
  cuda::AttentionStandIn attention(device, kAttentionSeconds);
  std::vector<double> waits;
  for (int i = 0; i <= repeats; ++i) {
    copies.submit(kCopiesPerLayer);
    attention.enqueue();
    device.stream().synchronize();
    const auto begin = std::chrono::steady_clock::now();
    const bool there = copies.done();
    copies.finish();
    if (i > 0) waits.push_back(there ? 0 : seconds_since(begin));
  }
  table.add(fmt::format("{}: {} copies of 9.4 MB behind 2 ms, exposed", name, kCopiesPerLayer),
            fmt::format("{:.1f} µs (largest {:.1f})", median(waits) * 1e6, *std::ranges::max_element(waits) * 1e6),
            "0");
}

void bandwidth(Table& table, Device& device, std::span<const std::byte> pinned, Copies& copies, int repeats) {
  const DeviceMemory to = device.allocate(Bytes{pinned.size()});
  double best = 1;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    copies.submit(8);
    copies.finish();
    best = std::min(best, seconds_since(begin) / 8);
  }
  const double bare = cuda::bare_copy_seconds(to.data(), pinned, repeats);
  const auto rate = [](double seconds) { return static_cast<double>(kCopyBytes) / seconds * 1e-9; };
  table.add("host path ÷ bare cudaMemcpyAsync",
            fmt::format("{:.3f} ({:.1f} ÷ {:.1f} GB/s)", bare / best, rate(best), rate(bare)), "≥ 0.90");
}

// Counted where we wait; and, for waits inside libraries: a layer is enqueued while the stream is held.
void host_waits(Table& table, Device& device, Layer& layer) {
  constexpr int kLayers = 20;
  constexpr double kHeldSeconds = 0.5;
  const std::int64_t before = cuda::waits_of_the_host();
  for (int i = 0; i < kLayers; ++i) layer.enqueue();
  const std::int64_t after = cuda::waits_of_the_host();
  table.add("host synchronisations per layer, counted",
            fmt::format("{}", static_cast<double>(after - before) / kLayers), "0");
  device.stream().synchronize();
  cuda::occupy_stream(device.stream(), kHeldSeconds);
  const auto begin = std::chrono::steady_clock::now();
  layer.enqueue();
  const double seconds = seconds_since(begin);
  const bool free = !happened(device.stream().record()) && seconds < kHeldSeconds / 2;
  device.stream().synchronize();
  table.add("a layer is enqueued while its stream is held",
            fmt::format("{} ({:.0f} µs)", free ? "yes" : "no", seconds * 1e6), "yes");
}

}  // namespace

int main(int argc, char** argv) try {
  if (num_cuda_devices() == 0) {
    fmt::print("no GPU: nothing was measured\n");
    return 77;
  }
  const int repeats = argc > 1 ? std::max(3, std::atoi(argv[1])) : 50;
  const auto device = make_cuda_device(0), other = make_cuda_device(0);
  const DeviceMemory peer = other->allocate(Bytes{kCopyBytes});
  std::vector<std::byte> arena(kCopyBytes);
  device->pin(arena);
  {
    Copies host(*device, arena.data()), from_peer(*device, peer.data());
    Layer layer(*device);
    layer.enqueue();
    device->stream().synchronize();
    fmt::print("{}, {} repeats\n\n| what | measured | aim |\n|---|---|---|\n", device->name(), repeats);
    Table table;
    slowdown(
        table, *device, "grouped GEMM, host path", [&] { layer.gemm(); }, host, repeats);
    slowdown(
        table, *device, "dispatch, host path", [&] { layer.dispatch(); }, host, repeats);
    slowdown(
        table, *device, "grouped GEMM, peer path", [&] { layer.gemm(); }, from_peer, repeats);
    slowdown(
        table, *device, "dispatch, peer path", [&] { layer.dispatch(); }, from_peer, repeats);
    exposed(table, *device, "host path", host, repeats);
    exposed(table, *device, "peer path", from_peer, repeats);
    bandwidth(table, *device, arena, host, repeats);
    host_waits(table, *device, layer);
    device->use_position_independent_rows(true);
    layer.gemm();
    cuda::DeviceStopwatch watch(device->stream());
    watch.begin();
    layer.gemm();
    watch.end();
    const double tiles = watch.seconds();
    device->use_position_independent_rows(false);
    watch.begin();
    layer.gemm();
    watch.end();
    table.add("position-independent rows ÷ grouped GEMM", fmt::format("{:.2f}", tiles / watch.seconds()), "told");
  }
  device->unpin(arena);
  return 0;
} catch (const std::exception& e) {
  fmt::print("{}\n", e.what());
  return 1;
}
