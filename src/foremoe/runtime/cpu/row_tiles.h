#pragma once

// Products whose rows do not know where they stand. A matrix product rounds a row's sums differently at the edge of a
// matrix than inside it, so that the same token gives other bits when its neighbours change.
//
// Method. Rows are multiplied in tiles of a fixed height, the last one filled up with zeros: every call then has the
//   same shape. What remains is whether rows differ inside a tile; that depends on the kernel for the shape and
//   is tried out once per shape and process: one row at all places of a tile, among equal and among other rows, must
//   give the same bits everywhere.
// Guarantee. The greatest of the heights below that passes is taken; 1 always does.

#include <cstdint>
#include <vector>

#include "foremoe/runtime/cpu/multiply.h"

namespace foremoe::cpu {

inline constexpr int kTileHeights[] = {64, 32, 16, 8, 4, 2, 1};

// Height of tiles for [·][columns] = [·][depth]·[columns][depth]ᵀ. Any thread may call.
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
