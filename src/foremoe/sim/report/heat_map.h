#pragma once

// A grid of cells whose colours tell how much: one colour for each interval of values, named in the legend.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/sim/report/chart.h"

namespace foremoe::report {

struct CellAxis {
  std::string label;
  int step = 1;      // what one cell stands for: the numbers at the axis count in it
  int separate = 0;  // a line after every so many cells; 0: none
};

struct HeatMap {
  ChartText text;
  CellAxis rows;                    // downwards
  CellAxis columns;                 // to the right
  Array<int, 2> bin;                // [row][column]
  std::vector<std::string> bounds;  // between the bins, ascending: one less than bins
  std::string least;                // what the legend says below the lowest bin …
  std::string most;                 // … and the highest
  std::string colours;              // the bins' classes: this and their number
  std::function<std::string(std::size_t row, std::size_t column)> cell_text;  // on hovering
  bool square = false;  // cells as high as wide, where that is not too high
};

// The bin of a value: how many of the ascending bounds are at most `value`.
int bin_of(double value, std::span<const double> bounds);

std::string draw(const HeatMap& map, Width width);

}  // namespace foremoe::report
