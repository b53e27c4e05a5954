#include "foremoe/runtime/cuda/cuda_copy_link.h"

#include <utility>

#include "foremoe/runtime/cuda/cuda_check.h"
#include "foremoe/runtime/cuda/cuda_stream.h"

namespace foremoe::cuda {

CudaCopyLink::CudaCopyLink(int device) : device_(device) {
  const CurrentDevice here(device_);
  FOREMOE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

CudaCopyLink::~CudaCopyLink() {
  FOREMOE_CUDA_NOTHROW(cudaStreamSynchronize(stream_));
  for (const auto& [id, event] : under_way_) free_.push_back(event);
  for (cudaEvent_t event : free_) {
    if (event != nullptr) FOREMOE_CUDA_NOTHROW(cudaEventDestroy(event));
  }
  FOREMOE_CUDA_NOTHROW(cudaStreamDestroy(stream_));
}

void CudaCopyLink::enqueue(const CopyRequest& request, cudaEvent_t behind) {
  wait_on(stream_, request.after);
  for (const Chunk& chunk : request.chunks) {
    FOREMOE_CUDA(cudaMemcpyAsync(chunk.to, chunk.from, chunk.bytes, cudaMemcpyDefault, stream_));
  }
  FOREMOE_CUDA(cudaEventRecord(behind, stream_));
}

void CudaCopyLink::submit(const CopyRequest& request) {
  const CurrentDevice here(device_);
  cudaEvent_t behind = nullptr;
  if (free_.empty()) {
    FOREMOE_CUDA(cudaEventCreateWithFlags(&behind, cudaEventDisableTiming));
  } else {
    behind = free_.back();
    free_.pop_back();
  }
  try {
    enqueue(request, behind);
  } catch (
      const CudaError&) {  // a failed copy is a state; its first chunks may be under way, and end before it is told
    FOREMOE_CUDA_NOTHROW(cudaStreamSynchronize(stream_));
    free_.push_back(std::exchange(behind, nullptr));
  }
  under_way_[request.id.value] = behind;
}

CopyState CudaCopyLink::poll(CopyId id) {
  const auto copy = under_way_.find(id.value);
  const cudaEvent_t behind = copy->second;
  const cudaError_t status = behind == nullptr ? cudaErrorUnknown : cudaEventQuery(behind);
  if (status == cudaErrorNotReady) return CopyState::kUnderWay;
  under_way_.erase(copy);
  if (behind != nullptr) free_.push_back(behind);
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status == cudaSuccess ? CopyState::kDone : CopyState::kFailed;
}

void CudaCopyLink::cancel(CopyId id) {
  const auto copy = under_way_.find(id.value);
  if (copy == under_way_.end()) return;
  if (copy->second != nullptr) {
    wait_for(copy->second);
    free_.push_back(copy->second);
  }
  under_way_.erase(copy);
}

}  // namespace foremoe::cuda
