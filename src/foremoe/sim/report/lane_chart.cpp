#include "foremoe/sim/report/lane_chart.h"

#include <fmt/format.h>

#include <algorithm>

namespace foremoe::report {
namespace {

constexpr double kBeneath = 5;  // height of what runs beside

}  // namespace

std::string draw(const LaneChart& chart, Width width) {
  Svg svg(drawn_width(width), svg_head(chart.text, width));
  std::vector<NamedRow> rows;
  for (const ChartLane& lane : chart.lanes) rows.push_back({.name = lane.name});
  const double top = draw_legend(svg, chart.series, {4, 0}, drawn_width(width) - 8) + 4;
  RowLayout layout = lay_out_rows(rows, width, top);
  layout.bar_height = 12;
  const Interval vertical{.begin = top, .end = layout.bottom(rows.size()) + 2};
  const Scale scale({.begin = 0, .end = chart.end}, layout.plot);
  const std::vector<double> at = ticks(scale.domain(), width == Width::kWide ? 8 : 5);
  const double bottom =
      draw_axis(svg, {.scale = scale, .ticks = at, .label = chart.axis, .tick_text = chart.tick_text}, vertical);
  for (std::size_t i = 0; i < chart.lanes.size(); ++i) {
    draw_name(svg, layout, i, rows[i]);
    for (const LaneSpan& span : chart.lanes[i].spans) {
      const double x = scale(span.begin);
      const double length = std::max(scale(span.end) - x, span.end > span.begin ? 0.4 : 0.0);
      if (length <= 0) continue;
      const double y = layout.bar_top(i) + (span.beneath ? layout.bar_height + 1 : 0);
      const std::string& css = chart.series[static_cast<std::size_t>(span.series)].css;
      svg.rect({x, y, length, span.beneath ? kBeneath : layout.bar_height}, "span " + css,
               fmt::format("{}, {}: {}", chart.lanes[i].name, span.name, chart.value_text(span.end - span.begin)));
    }
  }
  return svg.to_string(bottom);
}

}  // namespace foremoe::report
