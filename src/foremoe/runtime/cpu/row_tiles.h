#pragma once

// Matrix products in which the result of a row does not depend on its position. A matrix product rounds the sums of a
// row differently at the edge of a matrix than inside, so the bits of a token change with its neighbours.
//
// Method. Multiply rows in tiles of a fixed height and pad the last tile with zeros, so that every call has the same
//   shape. With some kernels, bits still depend on the position within a tile, so each process tests every shape once.
//   A row must produce equal bits at every position of a tile, next to equal rows and to other rows.
// Guarantee. Uses the largest of kTileHeights that passes the test; height 1 always passes.

#include <cstdint>
#include <vector>

#include "foremoe/runtime/cpu/multiply.h"

namespace foremoe::cpu {

inline constexpr int kTileHeights[] = {64, 32, 16, 8, 4, 2, 1};

// Tile height for [·][columns] = [·][depth]·[columns][depth]ᵀ. Thread-safe.
int tile_height(int columns, int depth);

struct TileWorkspace {
  std::vector<float> in;   // one tile of A
  std::vector<float> out;  // one tile of C
  void reserve(int columns, int depth);
};

// C = A·Bᵀ: C [rows][columns], A [rows][depth], B [columns][depth].
struct Projection {
  std::int64_t rows = 0;
  int columns = 0;
  int depth = 0;
};
void project(const Projection& size, const float* a, const float* b, float* c);
void project_by_tiles(const Projection& size, const float* a, const float* b, float* c, TileWorkspace& workspace);

}  // namespace foremoe::cpu
