#pragma once

// Load bars in the terminal, in eighths (▁▂▃▄▅▆▇█), coloured from idle (blue) to overloaded (red) if possible.

#include <span>
#include <string>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/units.h"

namespace foremoe::cli {

struct LoadPicture {
  std::string title;
  Array<Tokens, 2> rank_loads;  // [micro_step][rank]
  int max_rows = 64;            // micro-steps shown
  int columns = 100;            // width of the terminal
  bool color = false;
};

// Draws one bar per rank, first for the whole step, then for each micro-step. All rows use one scale: load ÷ mean of
// the row, clipped at 3. If the terminal is too narrow, neighbouring ranks share a bar that shows their maximum.
std::string draw(const LoadPicture& picture);

// One bar per value, from `low` to `high`. With more than `columns` values, a bar shows a maximum of neighbours.
std::string sparkline(std::span<const double> values, double low, double high, std::size_t columns);

}  // namespace foremoe::cli
