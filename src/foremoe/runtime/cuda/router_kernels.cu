#include <climits>

#include "foremoe/runtime/cuda/block_sum.cuh"
#include "foremoe/runtime/cuda/launch.cuh"
#include "foremoe/runtime/cuda/router_kernels.h"

namespace foremoe::cuda {
namespace {

// Lane 0 of the warp has it.
__device__ double warp_dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = threadIdx.x % 32; i < n; i += 32) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return warp_sum(sum);
}

__device__ const float* router_row(const RoutedTokens& tokens, std::int64_t expert) {
  return tokens.router + expert * tokens.hidden;
}

__global__ void router_forward_kernel(RoutedTokens tokens, float* weight) {
  extern __shared__ double logit[];  // [k]
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * tokens.k;
  const float* x = tokens.x + static_cast<std::int64_t>(blockIdx.x) * tokens.hidden;
  for (int j = threadIdx.x / 32; j < tokens.k; j += blockDim.x / 32) {
    const std::int32_t expert = tokens.expert[first + j];
    const double value = expert < 0 ? -INFINITY : warp_dot(x, router_row(tokens, expert), tokens.hidden);
    if (threadIdx.x % 32 == 0) logit[j] = value;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  double greatest = -INFINITY, sum = 0;
  for (int j = 0; j < tokens.k; ++j) greatest = fmax(greatest, logit[j]);
  for (int j = 0; j < tokens.k; ++j) {
    logit[j] = tokens.expert[first + j] < 0 ? 0 : exp(logit[j] - greatest);
    sum += logit[j];
  }
  for (int j = 0; j < tokens.k; ++j) weight[first + j] = sum == 0 ? 0.0F : static_cast<float>(logit[j] / sum);
}

__global__ void token_gradients_kernel(RoutedTokens tokens, RouterTokenGradients gradients) {
  extern __shared__ double d_logit[];  // [k]
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * tokens.k;
  if (threadIdx.x == 0) {
    double mean = 0;  // of the weights' gradients under the weights
    for (int j = 0; j < tokens.k; ++j) {
      if (tokens.expert[first + j] < 0) continue;
      mean += static_cast<double>(gradients.weight[first + j]) * static_cast<double>(gradients.d_weight[first + j]);
    }
    for (int j = 0; j < tokens.k; ++j) {
      const double weight = gradients.weight[first + j];
      d_logit[j] = tokens.expert[first + j] < 0 ? 0 : weight * (gradients.d_weight[first + j] - mean);
      gradients.d_logit[first + j] = d_logit[j];
    }
  }
  __syncthreads();
  float* dx = gradients.dx + static_cast<std::int64_t>(blockIdx.x) * tokens.hidden;
  for (int h = threadIdx.x; h < tokens.hidden; h += blockDim.x) {
    double sum = 0;
    for (int j = 0; j < tokens.k; ++j) {
      const std::int32_t expert = tokens.expert[first + j];
      if (expert >= 0) sum += d_logit[j] * router_row(tokens, expert)[h];
    }
    dx[h] += static_cast<float>(sum);
  }
}

__global__ void chunk_sum_kernel(RoutedTokens tokens, RouterWeightGradient gradient) {
  const int h = blockIdx.y * blockDim.x + threadIdx.x;
  if (h >= tokens.hidden) return;
  const EntryChunk chunk = gradient.chunk[blockIdx.x];
  double sum = 0;
  for (std::int32_t i = 0; i < chunk.count; ++i) {
    const std::int64_t entry = gradient.entry[chunk.first + i];
    sum += gradient.d_logit[entry] * tokens.x[entry / tokens.k * tokens.hidden + h];
  }
  gradient.partial[static_cast<std::int64_t>(blockIdx.x) * tokens.hidden + h] = sum;
}

__global__ void expert_sum_kernel(RoutedTokens tokens, RouterWeightGradient gradient) {
  const int h = blockIdx.y * blockDim.x + threadIdx.x;
  if (h >= tokens.hidden) return;
  const ExpertChunks chunks = gradient.expert[blockIdx.x];
  float& d_router = gradient.d_router[static_cast<std::int64_t>(chunks.expert) * tokens.hidden + h];
  double sum = d_router;
  for (std::int32_t i = 0; i < chunks.count; ++i) {
    sum += gradient.partial[static_cast<std::int64_t>(chunks.first + i) * tokens.hidden + h];
  }
  d_router = static_cast<float>(sum);
}

struct Candidate {
  double logit;
  int expert;  // INT_MAX: none
};

__device__ bool better(const Candidate& a, const Candidate& b) {
  if (a.expert == INT_MAX || b.expert == INT_MAX) return a.expert < b.expert;
  return a.logit > b.logit || (a.logit == b.logit && a.expert < b.expert);
}

__global__ void pick_kernel(RoutedTokens tokens, RouterPick pick) {
  extern __shared__ double logit[];                             // [experts]
  bool* taken = reinterpret_cast<bool*>(logit + pick.experts);  // [experts]
  __shared__ Candidate of_warp[kThreads / 32];
  const float* x = tokens.x + static_cast<std::int64_t>(pick.token[blockIdx.x]) * tokens.hidden;
  for (int e = threadIdx.x / 32; e < pick.experts; e += blockDim.x / 32) {
    const double value = warp_dot(x, router_row(tokens, e), tokens.hidden);
    if (threadIdx.x % 32 > 0) continue;
    logit[e] = isnan(value) ? -INFINITY : value;  // last, and still no expert twice
    taken[e] = false;
  }
  __syncthreads();
  for (int j = 0; j < tokens.k; ++j) {
    Candidate best{.logit = -INFINITY, .expert = INT_MAX};
    for (int e = threadIdx.x; e < pick.experts; e += blockDim.x) {
      const Candidate candidate{.logit = logit[e], .expert = e};
      if (!taken[e] && better(candidate, best)) best = candidate;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      const Candidate other{.logit = __shfl_down_sync(kAllLanes, best.logit, distance),
                            .expert = __shfl_down_sync(kAllLanes, best.expert, distance)};
      if (better(other, best)) best = other;
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) {
        if (better(of_warp[warp], best)) best = of_warp[warp];
      }
      pick.picked[static_cast<std::int64_t>(blockIdx.x) * tokens.k + j] = best.expert;
      taken[best.expert] = true;  // k ≤ experts: there always is one
    }
    __syncthreads();
  }
}

std::size_t shared_doubles(int n) { return static_cast<std::size_t>(n) * sizeof(double); }

}  // namespace

void router_forward(const RoutedTokens& tokens, float* weight, cudaStream_t stream) {
  if (tokens.tokens == 0) return;
  router_forward_kernel<<<static_cast<unsigned>(tokens.tokens), kThreads, shared_doubles(tokens.k), stream>>>(tokens,
                                                                                                              weight);
  check_launch();
}

void router_token_gradients(const RoutedTokens& tokens, const RouterTokenGradients& gradients, cudaStream_t stream) {
  if (tokens.tokens == 0) return;
  token_gradients_kernel<<<static_cast<unsigned>(tokens.tokens), kThreads, shared_doubles(tokens.k), stream>>>(
      tokens, gradients);
  check_launch();
}

void router_weight_gradient(const RoutedTokens& tokens, const RouterWeightGradient& gradient, cudaStream_t stream) {
  if (gradient.num_experts == 0) return;
  const unsigned columns = blocks_for(tokens.hidden);
  chunk_sum_kernel<<<dim3(static_cast<unsigned>(gradient.num_chunks), columns), kThreads, 0, stream>>>(tokens,
                                                                                                       gradient);
  check_launch();
  expert_sum_kernel<<<dim3(static_cast<unsigned>(gradient.num_experts), columns), kThreads, 0, stream>>>(tokens,
                                                                                                         gradient);
  check_launch();
}

void router_pick(const RoutedTokens& tokens, const RouterPick& pick, cudaStream_t stream) {
  if (pick.n == 0) return;
  const std::size_t shared = shared_doubles(pick.experts) + static_cast<std::size_t>(pick.experts);
  pick_kernel<<<static_cast<unsigned>(pick.n), kThreads, shared, stream>>>(tokens, pick);
  check_launch();
}

}  // namespace foremoe::cuda
