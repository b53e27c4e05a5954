#include "foremoe/runtime/cuda/launch.cuh"
#include "foremoe/runtime/cuda/row_tile_gemm.h"

namespace foremoe::cuda {
namespace {

constexpr int kSide = 64;   // of a tile of C
constexpr int kSlice = 16;  // of the depth
constexpr int kEach = 4;    // rows, and columns, per thread
constexpr int kAcross = kSide / kEach;
static_assert(kSide == kTileRows && kAcross * kAcross == kThreads);

// [slice][row]; the four extra keep transposed stores off each other's banks, and rows of four aligned.
using Slice = float[kSlice][kSide + 4];

// Rows `first…` of a matrix [rows][depth], zero beyond it.
__device__ void load(Slice& slice, const float* matrix, int rows, int depth, int begin) {
  for (int i = threadIdx.x; i < kSide * kSlice; i += kThreads) {
    const int row = i / kSlice, d = begin + i % kSlice;
    slice[i % kSlice][row] = row < rows && d < depth ? matrix[static_cast<std::int64_t>(row) * depth + d] : 0.0F;
  }
}

__global__ void __launch_bounds__(kThreads) tile_kernel(RowTileGemm gemm) {
  __shared__ Slice a, b;
  const RowTile tile = gemm.tiles[blockIdx.x];
  const int first_column = blockIdx.y * kSide;
  const float* a_tile = gemm.a + tile.first_row * gemm.depth;
  const float* b_tile = tile.b + static_cast<std::int64_t>(first_column) * gemm.depth;
  const int row = threadIdx.x / kAcross * kEach, column = threadIdx.x % kAcross * kEach;

  float sum[kEach][kEach] = {};
  for (int begin = 0; begin < gemm.depth; begin += kSlice) {
    load(a, a_tile, tile.rows, gemm.depth, begin);
    load(b, b_tile, gemm.columns - first_column, gemm.depth, begin);
    __syncthreads();
    for (int d = 0; d < kSlice; ++d) {
      for (int i = 0; i < kEach; ++i) {
        for (int j = 0; j < kEach; ++j) sum[i][j] = fmaf(a[d][row + i], b[d][column + j], sum[i][j]);
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kEach && row + i < tile.rows; ++i) {
    float* c = gemm.c + (tile.first_row + row + i) * gemm.columns + first_column + column;
    for (int j = 0; j < kEach && first_column + column + j < gemm.columns; ++j) c[j] = sum[i][j];
  }
}

}  // namespace

void multiply(const RowTileGemm& gemm, cudaStream_t stream) {
  if (gemm.num_tiles == 0) return;
  const dim3 grid(static_cast<unsigned>(gemm.num_tiles), static_cast<unsigned>((gemm.columns + kSide - 1) / kSide));
  tile_kernel<<<grid, kThreads, 0, stream>>>(gemm);
  check_launch();
}

}  // namespace foremoe::cuda
