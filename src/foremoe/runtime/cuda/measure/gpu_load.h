#pragma once

// Work for a GPU that measurements and tests need: to hold a stream, to stand for attention, to compare with. Names no
// CUDA type, so that benchmarks need none. Each function works on streams of make_cuda_device's devices.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "foremoe/runtime/device.h"

namespace foremoe::cuda {

// Enqueues a kernel of one thread that does nothing for so long.
void occupy_stream(Stream& stream, double seconds);

// A dense float32 GEMM, repeated to take about so long: what stands between MoE layers.
class AttentionStandIn {
 public:
  AttentionStandIn(Device& device, double seconds);
  ~AttentionStandIn();
  void enqueue();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Seconds of the device from here to there, by events with timing. `begin()` … `seconds()`, which waits.
class DeviceStopwatch {
 public:
  explicit DeviceStopwatch(Stream& stream);
  ~DeviceStopwatch();
  void begin();
  void end();
  double seconds();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Of a bare cudaMemcpyAsync from pinned host memory, the best of `repeats`.
double bare_copy_seconds(std::byte* to, std::span<const std::byte> pinned, int repeats);

std::int64_t waits_of_the_host();

}  // namespace foremoe::cuda
