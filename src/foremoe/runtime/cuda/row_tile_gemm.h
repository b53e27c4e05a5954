#pragma once

// C = A·Bᵀ in float32 whose rows do not know where they stand: A [rows][depth], B [columns][depth], C [rows][columns],
// all row-major. A library's GEMM chooses its kernel, and with it the order of a sum, by the number of rows.
//
// Method. Tiles of kTileRows rows by as many columns, kept in shared memory slice by slice of the depth. Every element
//   is one chain of fused multiply-adds over ascending depth, the same whatever row, tile or launch it is in; a tile
//   that is not full computes rows that it does not store.
// Cost. 4·4 products per thread between loads: about half of what cuBLAS reaches.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace foremoe::cuda {

inline constexpr int kTileRows = 64;

struct RowTile {
  const float* b = nullptr;
  std::int64_t first_row = 0;  // of A and C
  std::int32_t rows = 0;       // ≤ kTileRows
};

struct RowTileGemm {
  const RowTile* tiles = nullptr;  // the device's
  std::int64_t num_tiles = 0;
  const float* a = nullptr;
  float* c = nullptr;
  int columns = 0;
  int depth = 0;
};
void multiply(const RowTileGemm& gemm, cudaStream_t stream);

}  // namespace foremoe::cuda
