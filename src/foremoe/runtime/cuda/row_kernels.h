#pragma once

// Kernels over rows, one block per row or token. Every sum has a fixed order. `row` and all pointers are the device's.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace foremoe::cuda {

struct RowIndex {
  const std::int32_t* row = nullptr;  // [n]
  std::int64_t n = 0;
  int k = 1;      // entries per token
  int width = 0;  // of a row
};

void gather_rows(float* to, const float* from, const RowIndex& index, cudaStream_t stream);
void scatter_rows(float* to, const float* from, const RowIndex& index, cudaStream_t stream);
// weight null: all 1.
void combine(float* y, const float* rows, const float* weight, const RowIndex& index, cudaStream_t stream);

struct CombineBackward {
  float* d_rows = nullptr;
  float* d_weight = nullptr;
  const float* dy = nullptr;
  const float* rows = nullptr;
  const float* weight = nullptr;
};
void combine_backward(const CombineBackward& operands, const RowIndex& index, cudaStream_t stream);

}  // namespace foremoe::cuda
