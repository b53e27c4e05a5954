#include "foremoe/runtime/cuda/cuda_check.h"

#include <fmt/format.h>

#include <atomic>

namespace foremoe::cuda {
namespace {

std::atomic<std::int64_t> waits{0};

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // else the next launch would be blamed for it
  throw CudaError(fmt::format("{}: {} ({})", call, cudaGetErrorString(status), cudaGetErrorName(status)));
}

std::int64_t host_waits() { return waits.load(std::memory_order_relaxed); }

void wait_for(cudaStream_t stream) {
  waits.fetch_add(1, std::memory_order_relaxed);
  FOREMOE_CUDA(cudaStreamSynchronize(stream));
}

void wait_for(cudaEvent_t event) {
  waits.fetch_add(1, std::memory_order_relaxed);
  FOREMOE_CUDA(cudaEventSynchronize(event));
}

CurrentDevice::CurrentDevice(int device) {
  FOREMOE_CUDA(cudaGetDevice(&former_));
  if (former_ == device) return;
  FOREMOE_CUDA(cudaSetDevice(device));
  changed_ = true;
}

CurrentDevice::~CurrentDevice() {
  if (changed_) FOREMOE_CUDA_NOTHROW(cudaSetDevice(former_));
}

}  // namespace foremoe::cuda
