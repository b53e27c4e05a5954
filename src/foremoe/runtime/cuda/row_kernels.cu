#include "foremoe/runtime/cuda/block_sum.cuh"
#include "foremoe/runtime/cuda/launch.cuh"
#include "foremoe/runtime/cuda/row_kernels.h"

namespace foremoe::cuda {
namespace {

__device__ void copy_row(float* to, const float* from, int width) {
  for (int h = threadIdx.x; h < width; h += blockDim.x) to[h] = from[h];
}

__global__ void gather_kernel(float* to, const float* from, RowIndex index) {
  const std::int64_t i = blockIdx.x;
  const std::int64_t row = index.row[i];
  if (row >= 0) copy_row(to + i * index.width, from + row * index.width, index.width);
}

__global__ void scatter_kernel(float* to, const float* from, RowIndex index) {
  const std::int64_t i = blockIdx.x;
  const std::int64_t row = index.row[i];
  if (row >= 0) copy_row(to + row * index.width, from + i * index.width, index.width);
}

__global__ void combine_kernel(float* y, const float* rows, const float* weight, RowIndex index) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * index.k;
  y += static_cast<std::int64_t>(blockIdx.x) * index.width;
  for (int h = threadIdx.x; h < index.width; h += blockDim.x) {
    float sum = y[h];
    for (int j = 0; j < index.k; ++j) {
      const std::int64_t row = index.row[first + j];
      if (row < 0) continue;
      const float value = rows[row * index.width + h];
      sum += weight == nullptr ? value : weight[first + j] * value;
    }
    y[h] = sum;
  }
}

__global__ void combine_backward_kernel(CombineBackward operands, RowIndex index) {
  const std::int64_t i = blockIdx.x;
  const std::int64_t row = index.row[i];
  if (row < 0) return;
  const float* dy = operands.dy + i / index.k * index.width;
  const float* y = operands.rows + row * index.width;
  float* d_row = operands.d_rows + row * index.width;
  const float weight = operands.weight[i];
  double product = 0;
  for (int h = threadIdx.x; h < index.width; h += blockDim.x) {
    product += static_cast<double>(y[h]) * static_cast<double>(dy[h]);
    d_row[h] = weight * dy[h];
  }
  product = block_sum(product);
  if (threadIdx.x == 0) operands.d_weight[i] = static_cast<float>(product);
}

}  // namespace

void gather_rows(float* to, const float* from, const RowIndex& index, cudaStream_t stream) {
  if (index.n == 0) return;
  gather_kernel<<<static_cast<unsigned>(index.n), threads_for(index.width), 0, stream>>>(to, from, index);
  check_launch();
}

void scatter_rows(float* to, const float* from, const RowIndex& index, cudaStream_t stream) {
  if (index.n == 0) return;
  scatter_kernel<<<static_cast<unsigned>(index.n), threads_for(index.width), 0, stream>>>(to, from, index);
  check_launch();
}

void combine(float* y, const float* rows, const float* weight, const RowIndex& index, cudaStream_t stream) {
  if (index.n == 0) return;
  combine_kernel<<<static_cast<unsigned>(index.n / index.k), threads_for(index.width), 0, stream>>>(y, rows, weight,
                                                                                                    index);
  check_launch();
}

void combine_backward(const CombineBackward& operands, const RowIndex& index, cudaStream_t stream) {
  if (index.n == 0) return;
  combine_backward_kernel<<<static_cast<unsigned>(index.n), threads_for(index.width), 0, stream>>>(operands, index);
  check_launch();
}

}  // namespace foremoe::cuda
