#include "foremoe/runtime/cuda/measure/gpu_load.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "foremoe/runtime/cuda/cuda_check.h"
#include "foremoe/runtime/cuda/cuda_stream.h"
#include "foremoe/runtime/cuda/grouped_gemm.h"

namespace foremoe::cuda {
namespace {

constexpr std::int64_t kSide = 1024;  // of the stand-in's matrices: 2.1 GFLOP each

cudaStream_t handle_of(Stream& stream) { return dynamic_cast<CudaStream&>(stream).handle(); }

}  // namespace

struct DeviceStopwatch::State {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
};

DeviceStopwatch::DeviceStopwatch(Stream& stream) : state_(std::make_unique<State>()) {
  state_->stream = handle_of(stream);
  FOREMOE_CUDA(cudaEventCreate(&state_->begin));
  FOREMOE_CUDA(cudaEventCreate(&state_->end));
}

DeviceStopwatch::~DeviceStopwatch() {
  FOREMOE_CUDA_NOTHROW(cudaEventDestroy(state_->begin));
  FOREMOE_CUDA_NOTHROW(cudaEventDestroy(state_->end));
}

void DeviceStopwatch::begin() { FOREMOE_CUDA(cudaEventRecord(state_->begin, state_->stream)); }

void DeviceStopwatch::end() { FOREMOE_CUDA(cudaEventRecord(state_->end, state_->stream)); }

double DeviceStopwatch::seconds() {
  FOREMOE_CUDA(cudaEventSynchronize(state_->end));
  float milliseconds = 0;
  FOREMOE_CUDA(cudaEventElapsedTime(&milliseconds, state_->begin, state_->end));
  return static_cast<double>(milliseconds) * 1e-3;
}

struct AttentionStandIn::State {
  State(Stream& stream) : ring(handle_of(stream), std::size_t{1} << 16), gemm(handle_of(stream), ring) {}
  StagingRing ring;
  GroupedGemm gemm;
  DeviceMemory a, b, c;
  int repeats = 1;
};

AttentionStandIn::AttentionStandIn(Device& device, double seconds) : state_(std::make_unique<State>(device.stream())) {
  const Bytes bytes{kSide * kSide * static_cast<std::int64_t>(sizeof(float))};
  state_->a = device.allocate(bytes);
  state_->b = device.allocate(bytes);
  state_->c = device.allocate(bytes);
  enqueue();
  DeviceStopwatch watch(device.stream());
  state_->repeats = 10;
  watch.begin();
  enqueue();
  watch.end();
  state_->repeats = std::max(1, static_cast<int>(std::lround(10 * seconds / watch.seconds())));
}

AttentionStandIn::~AttentionStandIn() = default;

void AttentionStandIn::enqueue() {
  const Gemm gemm{.a = state_->a.floats(),
                  .b = state_->b.floats(),
                  .c = state_->c.floats(),
                  .rows = kSide,
                  .columns = kSide,
                  .depth = kSide};
  for (int i = 0; i < state_->repeats; ++i) state_->gemm.multiply({&gemm, 1}, GemmForm::kNormal);
}

double bare_copy_seconds(std::byte* to, std::span<const std::byte> pinned, int repeats) {
  cudaStream_t handle = nullptr;
  FOREMOE_CUDA(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  double best = std::numeric_limits<double>::infinity();
  {
    CudaStream stream(handle);
    DeviceStopwatch watch(stream);
    for (int i = 0; i < repeats; ++i) {
      watch.begin();
      FOREMOE_CUDA(cudaMemcpyAsync(to, pinned.data(), pinned.size(), cudaMemcpyHostToDevice, handle));
      watch.end();
      best = std::min(best, watch.seconds());
    }
  }
  FOREMOE_CUDA(cudaStreamDestroy(handle));
  return best;
}

std::int64_t waits_of_the_host() { return host_waits(); }

}  // namespace foremoe::cuda
