#pragma once

// The router's operations with their scratch: sorts the entries of a call by expert on the host, where they are, and
// lets the kernels (router_kernels.h) sum them in that order.

#include <functional>
#include <span>
#include <vector>

#include "foremoe/runtime/cuda/router_kernels.h"
#include "foremoe/runtime/cuda/staging_ring.h"
#include "foremoe/runtime/device.h"

namespace foremoe::cuda {

class CudaRouter {
 public:
  using Allocate = std::function<DeviceMemory(Bytes)>;
  CudaRouter(cudaStream_t stream, StagingRing& ring, Allocate allocate);

  struct Tokens {
    const float* x = nullptr;
    const float* router = nullptr;
    std::span<const std::int32_t> expert;  // [token·k + j], the host's
    int k = 1;
    int hidden = 0;
  };
  struct Gradients {
    const float* weight = nullptr;
    const float* d_weight = nullptr;
    float* dx = nullptr;
    float* d_router = nullptr;
  };
  void forward(const Tokens& tokens, float* weight);
  void backward(const Tokens& tokens, const Gradients& gradients);
  // [token·k + j], the device's; valid until the next call.
  const std::int32_t* pick(const Tokens& tokens, int experts, std::span<const std::int32_t> token);

 private:
  RoutedTokens on_device(const Tokens& tokens);
  void sort_by_expert(std::span<const std::int32_t> expert);
  std::byte* scratch(DeviceMemory& memory, std::int64_t bytes);

  cudaStream_t stream_;
  StagingRing& ring_;
  Allocate allocate_;
  DeviceMemory d_logit_;
  DeviceMemory partial_;
  DeviceMemory picked_;
  std::vector<std::int32_t> first_, entry_;  // [expert + 1], [entry]
  std::vector<EntryChunk> chunks_;
  std::vector<ExpertChunks> experts_;
};

}  // namespace foremoe::cuda
