#pragma once

// Distributions, one below the other: a thin line from the least to the largest value, a box over the middle half, a
// bar at the median, a dot at the mean.

#include <span>
#include <string>
#include <vector>

#include "foremoe/sim/report/chart.h"

namespace foremoe::report {

struct Quantiles {
  double least = 0;
  double p25 = 0;
  double median = 0;
  double p75 = 0;
  double p99 = 0;
  double most = 0;
  double mean = 0;
};

// Linear between the two nearest, as numpy.percentile does; zeros for no values.
Quantiles quantiles(std::span<const double> values);

struct BoxRow {
  NamedRow row;
  Quantiles values;
};

struct BoxChart {
  ChartText text;
  std::string axis;
  double begin = 1;  // of the axis, which is logarithmic
  std::vector<BoxRow> rows;
  NumberText value_text;
};

std::string draw(const BoxChart& chart, Width width);

}  // namespace foremoe::report
