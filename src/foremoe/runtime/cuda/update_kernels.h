#pragma once

// Element-wise kernels of optimizers, losses and the SwiGLU of an expert.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace foremoe::cuda {

void add(float* to, const float* from, std::int64_t n, cudaStream_t stream);
void sgd(float* weights, const float* gradient, std::int64_t n, float rate, cudaStream_t stream);

struct AdamStep {
  float* weights = nullptr;
  const float* gradient = nullptr;
  float* mean = nullptr;
  float* square = nullptr;
  std::int64_t n = 0;
  float rate = 0, beta1 = 0, beta2 = 0, epsilon = 0;
  float mean_scale = 1, square_scale = 1;  // 1 ÷ (1 − βᵗ)
};
void adam(const AdamStep& step, cudaStream_t stream);

inline constexpr int kErrorBlocks = 256;

struct SquaredError {
  const float* x = nullptr;
  const float* target = nullptr;
  float* gradient = nullptr;
  std::int64_t n = 0;
  float scale = 1;
  double* sums = nullptr;  // [kErrorBlocks]; the result is in the first
};
void squared_error(const SquaredError& error, cudaStream_t stream);

// Over rows [first, first + rows) of matrices that begin with row 0.
struct SwigluRows {
  const float* gate_up = nullptr;  // [row][2·intermediate]
  float* activation = nullptr;     // [row][intermediate]
  std::int64_t first = 0;
  std::int64_t rows = 0;
  int intermediate = 0;
};
void swiglu(const SwigluRows& rows, cudaStream_t stream);
// Also computes the activation again.
void swiglu_backward(const SwigluRows& rows, const float* d_activation, float* d_gate_up, cudaStream_t stream);

}  // namespace foremoe::cuda
