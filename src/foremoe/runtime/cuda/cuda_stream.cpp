#include "foremoe/runtime/cuda/cuda_stream.h"

#include <algorithm>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::cuda {

CudaStream::CudaStream(cudaStream_t stream) : stream_(stream) {
  try {
    for (cudaEvent_t& event : ring_) FOREMOE_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  } catch (...) {
    destroy();
    throw;
  }
}

CudaStream::~CudaStream() { destroy(); }

void CudaStream::destroy() noexcept {
  for (cudaEvent_t event : ring_) {
    if (event != nullptr) FOREMOE_CUDA_NOTHROW(cudaEventDestroy(event));
  }
}

Event CudaStream::record() {
  const std::lock_guard lock(mutex_);
  FOREMOE_CUDA(cudaEventRecord(ring_[(last_ + 1) % kEventsKept], stream_));
  return {.stream = this, .number = ++last_};
}

cudaEvent_t CudaStream::kept(std::uint64_t number) const {
  const std::uint64_t oldest = last_ < kEventsKept ? 1 : last_ - kEventsKept + 1;
  return ring_[std::max(number, oldest) % kEventsKept];
}

void CudaStream::wait(const Event& event) {
  if (event.stream != this) wait_on(stream_, event);
}

bool CudaStream::done(const Event& event) const {
  const std::lock_guard lock(mutex_);
  if (event.number <= done_) return true;
  const cudaError_t status = cudaEventQuery(kept(event.number));
  if (status == cudaErrorNotReady) return false;
  FOREMOE_CUDA(status);
  done_ = std::max(done_, event.number);
  return true;
}

void CudaStream::let_wait(cudaStream_t other, const Event& event) const {
  const std::lock_guard lock(mutex_);
  if (event.number > done_) FOREMOE_CUDA(cudaStreamWaitEvent(other, kept(event.number), 0));
}

void CudaStream::synchronize() { wait_for(stream_); }

void wait_on(cudaStream_t stream, const Event& event) {
  if (event.stream == nullptr) return;
  if (const auto* source = dynamic_cast<const CudaStream*>(event.stream)) {
    source->let_wait(stream, event);
  } else if (!happened(event)) {
    event.stream->synchronize();
  }
}

}  // namespace foremoe::cuda
