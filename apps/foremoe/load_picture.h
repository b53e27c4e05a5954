#pragma once

// Loads seen: bars of eighths (▁▂▃▄▅▆▇█), coloured from idle (blue) to overloaded (red) where the terminal can.

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
  int columns = 100;            // of the screen
  bool color = false;
};

// A bar per rank: first of the whole step, then of each micro-step, all on one scale of load ÷ mean of their row, cut
// at 3. Neighbouring ranks share a bar, the largest among them, where the screen is too narrow.
std::string draw(const LoadPicture& picture);

// One bar per value, from `low` to `high`. Of more than `columns` values neighbours share a bar, the largest of them.
std::string sparkline(std::span<const double> values, double low, double high, std::size_t columns);

}  // namespace foremoe::cli
