#pragma once

// What happened when: spans of time on lanes, one lane below the other.

#include <string>
#include <vector>

#include "foremoe/sim/report/chart.h"

namespace foremoe::report {

struct LaneSpan {
  int series = 0;
  double begin = 0;
  double end = 0;
  bool beneath = false;  // beside the lane's work: a thin bar below it
  std::string name;      // on hovering
};

struct ChartLane {
  std::string name;
  std::vector<LaneSpan> spans;
};

struct LaneChart {
  ChartText text;
  std::string axis;
  std::vector<Series> series;
  std::vector<ChartLane> lanes;
  double end = 0;  // of the axis, which begins at 0
  NumberText tick_text;
  NumberText value_text;  // of a duration
};

std::string draw(const LaneChart& chart, Width width);

}  // namespace foremoe::report
