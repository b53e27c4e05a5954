#include "foremoe/runtime/cpu/row_tiles.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "foremoe/core/random.h"

namespace foremoe::cpu {

namespace {

constexpr int kTrials = 4;  // rows tested; a different summation order changes about every second sum

std::vector<float> random_values(std::size_t n, Random& random) {
  std::vector<float> values(n);
  for (float& v : values) v = static_cast<float>(2 * random.uniform() - 1);
  return values;
}

// Returns whether a row produces the same bits at every position and next to all tested rows.
bool is_position_independent(int height, int columns, int depth) {
  Random random(1);
  const auto at = [](int row, int width) { return static_cast<std::ptrdiff_t>(row) * width; };
  const Projection size{.rows = height, .columns = columns, .depth = depth};
  const std::vector<float> b = random_values(static_cast<std::size_t>(at(columns, depth)), random);
  std::vector<float> c(static_cast<std::size_t>(at(height, columns)));
  std::vector<float> first(static_cast<std::size_t>(columns));
  for (int trial = 0; trial < kTrials; ++trial) {
    const std::vector<float> row = random_values(static_cast<std::size_t>(depth), random);
    // Fill the tile with copies of the row (0), then place the row at every even (1) and at every odd position (2).
    for (const int among : {0, 1, 2}) {
      const auto has_row = [&](int i) { return among == 0 || i % 2 == among - 1; };
      std::vector<float> a = random_values(static_cast<std::size_t>(at(height, depth)), random);
      for (int i = 0; i < height; ++i) {
        if (has_row(i)) std::copy(row.begin(), row.end(), a.begin() + at(i, depth));
      }
      project(size, a.data(), b.data(), c.data());
      if (among == 0) first.assign(c.begin(), c.begin() + columns);
      for (int i = 0; i < height; ++i) {
        if (has_row(i) && std::memcmp(&c[static_cast<std::size_t>(at(i, columns))], first.data(),
                                      first.size() * sizeof(float)) != 0) {
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int tile_height(int columns, int depth) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> known;  // guarded by mutex
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace({columns, depth}, 1);
  if (is_new) {
    const int* height = std::begin(kTileHeights);
    while (*height > 1 && !is_position_independent(*height, columns, depth)) ++height;
    entry->second = *height;
  }
  return entry->second;
}

void TileWorkspace::reserve(int columns, int depth) {
  const auto height = static_cast<std::size_t>(tile_height(columns, depth));
  in.resize(std::max(in.size(), height * static_cast<std::size_t>(depth)));
  out.resize(std::max(out.size(), height * static_cast<std::size_t>(columns)));
}

void project(const Projection& size, const float* a, const float* b, float* c) {
  multiply({.rows = size.rows, .columns = size.columns, .depth = size.depth, .transpose_b = true}, a, b, c);
}

void project_by_tiles(const Projection& size, const float* a, const float* b, float* c, TileWorkspace& workspace) {
  const int height = tile_height(size.columns, size.depth);
  const Projection tile{.rows = height, .columns = size.columns, .depth = size.depth};
  std::int64_t row = 0;
  for (; row + height <= size.rows; row += height) {
    project(tile, a + row * size.depth, b, c + row * size.columns);
  }
  const std::int64_t rest = size.rows - row;
  if (rest == 0) return;
  workspace.reserve(size.columns, size.depth);
  const auto rest_of_a = static_cast<std::ptrdiff_t>(rest * size.depth);
  std::copy_n(a + row * size.depth, rest_of_a, workspace.in.begin());
  std::fill(workspace.in.begin() + rest_of_a, workspace.in.end(), 0.0F);
  project(tile, workspace.in.data(), b, workspace.out.data());
  std::copy_n(workspace.out.begin(), rest * size.columns, c + row * size.columns);
}

}  // namespace foremoe::cpu
