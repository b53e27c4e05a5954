#pragma once

// Horizontal bars, one below the other, each stacked of parts.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/sim/report/chart.h"

namespace foremoe::report {

struct Bar {
  NamedRow row;
  std::vector<double> values;  // [series], ≥ 0
};

struct BarChart {
  ChartText text;
  std::string axis;            // what is measured, and its unit
  std::vector<Series> series;  // a legend where there is more than one
  std::vector<Bar> bars;
  NumberText value_text;            // of a part, on hovering
  NumberText tick_text;             // on the axis, without the unit
  std::optional<double> reference;  // a line over all bars
  std::optional<double> axis_end;   // none: round, above the longest bar
};

std::string draw(const BarChart& chart, Width width);

}  // namespace foremoe::report
