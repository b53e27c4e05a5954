#pragma once

// The sum of a double of every thread of a block, in a fixed order: lanes by halves, then warps ascending.

namespace foremoe::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffU;

__device__ inline double warp_sum(double value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(kAllLanes, value, distance);
  return value;  // lane 0 has it
}

// Thread 0 has it on return. All threads of the block call; its size is a multiple of 32.
__device__ inline double block_sum(double value) {
  __shared__ double of_warp[32];
  value = warp_sum(value);
  __syncthreads();  // of_warp may still be read from the call before
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value += of_warp[warp];
  }
  return value;
}

}  // namespace foremoe::cuda
