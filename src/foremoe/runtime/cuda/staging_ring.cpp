#include "foremoe/runtime/cuda/staging_ring.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::cuda {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

StagingRing::StagingRing(cudaStream_t stream, std::size_t segment_bytes) : stream_(stream) {
  try {
    for (cudaEvent_t& event : left_) FOREMOE_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    allocate(segment_bytes);
  } catch (...) {
    release();
    throw;
  }
}

StagingRing::~StagingRing() {
  FOREMOE_CUDA_NOTHROW(cudaStreamSynchronize(stream_));
  release();
}

void StagingRing::release() noexcept {
  outgrown_.push_back({.host = host_, .device = device_});
  for (const Memory& memory : outgrown_) {
    FOREMOE_CUDA_NOTHROW(cudaFreeHost(memory.host));
    FOREMOE_CUDA_NOTHROW(cudaFree(memory.device));
  }
  for (cudaEvent_t event : left_) {
    if (event != nullptr) FOREMOE_CUDA_NOTHROW(cudaEventDestroy(event));
  }
}

void StagingRing::allocate(std::size_t segment_bytes) {
  segment_bytes_ = aligned(segment_bytes);
  FOREMOE_CUDA(cudaMallocHost(reinterpret_cast<void**>(&host_), segment_bytes_ * kSegments));
  FOREMOE_CUDA(cudaMalloc(reinterpret_cast<void**>(&device_), segment_bytes_ * kSegments));
}

std::size_t StagingRing::take(std::size_t bytes) {
  if (bytes > segment_bytes_) {
    outgrown_.push_back({.host = std::exchange(host_, nullptr), .device = std::exchange(device_, nullptr)});
    allocate(std::max(bytes, 2 * segment_bytes_));
    used_ = 0;
  }
  if (used_ + bytes > segment_bytes_) {
    FOREMOE_CUDA(cudaEventRecord(left_[static_cast<std::size_t>(segment_)], stream_));
    segment_ = (segment_ + 1) % kSegments;
    used_ = 0;
    cudaEvent_t former = left_[static_cast<std::size_t>(segment_)];
    const cudaError_t status = cudaEventQuery(former);
    if (status == cudaErrorNotReady) {
      wait_for(former);
    } else {
      FOREMOE_CUDA(status);
    }
  }
  const std::size_t begin = static_cast<std::size_t>(segment_) * segment_bytes_ + used_;
  used_ += aligned(bytes);
  return begin;
}

void StagingRing::copy(std::byte* to, std::span<const std::byte> from) {
  if (from.empty()) return;
  const std::size_t begin = take(from.size());
  std::memcpy(host_ + begin, from.data(), from.size());
  FOREMOE_CUDA(cudaMemcpyAsync(to, host_ + begin, from.size(), cudaMemcpyHostToDevice, stream_));
}

const std::byte* StagingRing::stage_bytes(std::span<const std::byte> from) {
  const std::size_t begin = take(from.size());
  if (from.empty()) return device_ + begin;
  std::memcpy(host_ + begin, from.data(), from.size());
  FOREMOE_CUDA(cudaMemcpyAsync(device_ + begin, host_ + begin, from.size(), cudaMemcpyHostToDevice, stream_));
  return device_ + begin;
}

}  // namespace foremoe::cuda
