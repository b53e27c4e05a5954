#include "foremoe/runtime/cuda/block_sum.cuh"
#include "foremoe/runtime/cuda/launch.cuh"
#include "foremoe/runtime/cuda/update_kernels.h"

namespace foremoe::cuda {
namespace {

__device__ std::int64_t thread_of_grid() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

__global__ void add_kernel(float* to, const float* from, std::int64_t n) {
  const std::int64_t i = thread_of_grid();
  if (i < n) to[i] += from[i];
}

__global__ void sgd_kernel(float* weights, const float* gradient, std::int64_t n, float rate) {
  const std::int64_t i = thread_of_grid();
  if (i < n) weights[i] -= rate * gradient[i];
}

__global__ void adam_kernel(AdamStep step) {
  const std::int64_t i = thread_of_grid();
  if (i >= step.n) return;
  const float g = step.gradient[i];
  const float mean = step.beta1 * step.mean[i] + (1 - step.beta1) * g;
  const float square = step.beta2 * step.square[i] + (1 - step.beta2) * (g * g);
  step.mean[i] = mean;
  step.square[i] = square;
  step.weights[i] -= step.rate * (mean * step.mean_scale) / (sqrtf(square * step.square_scale) + step.epsilon);
}

__global__ void error_kernel(SquaredError error) {
  double sum = 0;
  for (std::int64_t i = thread_of_grid(); i < error.n; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    const float difference = error.x[i] - error.target[i];
    error.gradient[i] = difference * error.scale;
    sum += 0.5 * static_cast<double>(difference) * static_cast<double>(difference);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) error.sums[blockIdx.x] = sum;
}

__global__ void error_sum_kernel(double* sums, float scale) {
  const double sum = block_sum(sums[threadIdx.x]);
  if (threadIdx.x == 0) sums[0] = sum * static_cast<double>(scale);
}

__device__ float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

__global__ void swiglu_kernel(SwigluRows rows) {
  const std::int64_t row = rows.first + blockIdx.x;
  const float* gate = rows.gate_up + row * 2 * rows.intermediate;
  const float* up = gate + rows.intermediate;
  float* activation = rows.activation + row * rows.intermediate;
  for (int i = threadIdx.x; i < rows.intermediate; i += blockDim.x) activation[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

__global__ void swiglu_backward_kernel(SwigluRows rows, const float* d_activation, float* d_gate_up) {
  const std::int64_t row = rows.first + blockIdx.x;
  const std::int64_t wide = row * 2 * rows.intermediate, narrow = row * rows.intermediate;
  for (int i = threadIdx.x; i < rows.intermediate; i += blockDim.x) {
    const float gate = rows.gate_up[wide + i], up = rows.gate_up[wide + rows.intermediate + i];
    const float d = d_activation[narrow + i];
    const float s = sigmoid(gate), silu = gate * s;
    rows.activation[narrow + i] = silu * up;
    d_gate_up[wide + i] = d * up * (s + silu * (1.0F - s));
    d_gate_up[wide + rows.intermediate + i] = d * silu;
  }
}

}  // namespace

void add(float* to, const float* from, std::int64_t n, cudaStream_t stream) {
  if (n == 0) return;
  add_kernel<<<blocks_for(n), kThreads, 0, stream>>>(to, from, n);
  check_launch();
}

void sgd(float* weights, const float* gradient, std::int64_t n, float rate, cudaStream_t stream) {
  if (n == 0) return;
  sgd_kernel<<<blocks_for(n), kThreads, 0, stream>>>(weights, gradient, n, rate);
  check_launch();
}

void adam(const AdamStep& step, cudaStream_t stream) {
  if (step.n == 0) return;
  adam_kernel<<<blocks_for(step.n), kThreads, 0, stream>>>(step);
  check_launch();
}

void squared_error(const SquaredError& error, cudaStream_t stream) {
  error_kernel<<<kErrorBlocks, kThreads, 0, stream>>>(error);
  check_launch();
  error_sum_kernel<<<1, kErrorBlocks, 0, stream>>>(error.sums, error.scale);
  check_launch();
}

void swiglu(const SwigluRows& rows, cudaStream_t stream) {
  if (rows.rows == 0) return;
  swiglu_kernel<<<static_cast<unsigned>(rows.rows), threads_for(rows.intermediate), 0, stream>>>(rows);
  check_launch();
}

void swiglu_backward(const SwigluRows& rows, const float* d_activation, float* d_gate_up, cudaStream_t stream) {
  if (rows.rows == 0) return;
  swiglu_backward_kernel<<<static_cast<unsigned>(rows.rows), threads_for(rows.intermediate), 0, stream>>>(
      rows, d_activation, d_gate_up);
  check_launch();
}

}  // namespace foremoe::cuda
