#pragma once

// The grouped SwiGLU of a rank's experts, forward and backward: five grouped GEMMs and an element-wise kernel each way.

#include <functional>
#include <span>
#include <vector>

#include "foremoe/runtime/cuda/grouped_gemm.h"
#include "foremoe/runtime/cuda/row_tile_gemm.h"
#include "foremoe/runtime/device.h"

namespace foremoe::cuda {

class CudaExperts {
 public:
  using Allocate = std::function<DeviceMemory(Bytes)>;
  CudaExperts(cudaStream_t stream, StagingRing& ring, Allocate allocate);

  void reserve(std::int64_t rows, ExpertShape shape);
  void use_position_independent_rows(bool on) { position_independent_ = on; }

  void forward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, float* gate_up, float* y);
  struct Gradients {
    const float* dy = nullptr;
    float* dx = nullptr;
  };
  void backward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, const float* gate_up,
                const Gradients& gradients);

 private:
  struct Weights;
  // y = x·Wᵀ for every expert, W [columns][depth].
  void multiply_by_weights(std::span<const ExpertRows> experts, const Weights& weights, const float* x, float* y);

  cudaStream_t stream_;
  StagingRing& ring_;
  Allocate allocate_;
  GroupedGemm gemm_;
  bool position_independent_ = false;
  DeviceMemory activation_;    // [row][intermediate]
  DeviceMemory d_activation_;  // [row][intermediate]
  DeviceMemory d_gate_up_;     // [row][2·intermediate]
  std::vector<Gemm> gemms_;
  std::vector<RowTile> tiles_;
};

}  // namespace foremoe::cuda
