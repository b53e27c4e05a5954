#pragma once

// Copies by cudaMemcpyAsync on a stream of the link's own: by copy engines between the host and a GPU and between
// GPUs, so that the compute stream's kernels run on; within one GPU the driver chooses. The host never waits: a copy
// begins after its event by a wait in the stream, and is asked about by an event recorded behind it.

#include <cuda_runtime_api.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "foremoe/transfer/copy_link.h"

namespace foremoe::cuda {

class CudaCopyLink final : public CopyLink {
 public:
  explicit CudaCopyLink(int device);
  ~CudaCopyLink() override;
  CudaCopyLink(const CudaCopyLink&) = delete;
  CudaCopyLink& operator=(const CudaCopyLink&) = delete;

  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId id) override;
  void cancel(CopyId id) override;  // waits for what is under way: a copy engine cannot be stopped
  void progress() override {}

 private:
  void enqueue(const CopyRequest& request, cudaEvent_t behind);

  int device_;
  cudaStream_t stream_ = nullptr;
  std::unordered_map<std::int32_t, cudaEvent_t> under_way_;  // by CopyId; null: could not be enqueued
  std::vector<cudaEvent_t> free_;
};

}  // namespace foremoe::cuda
