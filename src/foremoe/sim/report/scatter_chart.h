#pragma once

// Points of two quantities, less of the one and more of the other being better, and the front of those that no other
// point beats in both.

#include <string>
#include <vector>

#include "foremoe/sim/report/chart.h"

namespace foremoe::report {

struct ScatterPoint {
  double x = 0;
  double y = 0;
  int series = 0;
  std::string label;    // beside it
  std::string tooltip;  // its numbers
};

struct ScatterChart {
  ChartText text;
  std::string x_axis;
  std::string y_axis;
  std::vector<Series> series;  // the first four have a shape of their own
  std::vector<ScatterPoint> points;
  NumberText x_text;  // ticks
  NumberText y_text;
};

// The points with no other at most as far right and at least as high, by x; of equal points the first.
std::vector<std::size_t> pareto_front(std::span<const ScatterPoint> points);

std::string draw(const ScatterChart& chart, Width width);

}  // namespace foremoe::report
