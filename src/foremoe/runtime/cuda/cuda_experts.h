#pragma once

// The grouped SwiGLU of a rank's experts, forward and backward: grouped GEMMs with an element-wise kernel between them.
//
// Gradients of weights are sums over rows. They are taken kGradientRows at a time, each part added to the sum of those
// before, so that long sums keep their digits; parts of one gradient, also those of an expert with rows in two places,
// go into rounds one after the other.

#include <functional>
#include <span>
#include <vector>

#include "foremoe/runtime/cuda/grouped_gemm.h"
#include "foremoe/runtime/cuda/row_tile_gemm.h"
#include "foremoe/runtime/device.h"

namespace foremoe::cuda {

inline constexpr std::int64_t kGradientRows = 2048;

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

  // Rows whose products are added to one gradient, and which go together: no gradient twice in a round.
  struct GradientPart {
    const ExpertRows* expert = nullptr;
    std::int64_t first_row = 0;
    std::int64_t rows = 0;
    int round = 0;
    bool add = false;
  };
  void cut_gradients(std::span<const ExpertRows> experts);
  template <class GemmOf>
  void multiply_gradients(GemmOf gemm_of);

  cudaStream_t stream_;
  StagingRing& ring_;
  Allocate allocate_;
  GroupedGemm gemm_;
  bool position_independent_ = false;
  DeviceMemory activation_;    // [row][intermediate]
  DeviceMemory d_activation_;  // [row][intermediate]
  DeviceMemory d_gate_up_;     // [row][2·intermediate]
  std::vector<Gemm> gemms_;
  std::vector<GradientPart> parts_;
  std::vector<RowTile> tiles_;
};

}  // namespace foremoe::cuda
