#pragma once

// Shapes of launches.

#include <algorithm>
#include <cstdint>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::cuda {

inline constexpr int kThreads = 256;

// Threads for a block that walks over `width` values; a multiple of 32.
inline unsigned threads_for(int width) {
  return static_cast<unsigned>(std::clamp((width + 31) / 32 * 32, 32, kThreads));
}

inline unsigned blocks_for(std::int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

inline void check_launch() { FOREMOE_CUDA(cudaGetLastError()); }

}  // namespace foremoe::cuda
