#include "foremoe/sim/report/bar_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace foremoe::report {
namespace {

double length(const Bar& bar) { return std::accumulate(bar.values.begin(), bar.values.end(), 0.0); }

double longest(const BarChart& chart) {
  double most = chart.reference.value_or(0);
  for (const Bar& bar : chart.bars) most = std::max(most, length(bar));
  return most;
}

void draw_bar(Svg& svg, const BarChart& chart, const RowLayout& layout, const Scale& scale, std::size_t index) {
  const Bar& bar = chart.bars[index];
  double begin = 0;
  for (std::size_t s = 0; s < bar.values.size(); ++s) {
    const double end = begin + bar.values[s];
    const Box box{scale(begin), layout.bar_top(index), scale(end) - scale(begin), layout.bar_height};
    begin = end;
    if (box.width <= 0) continue;
    const Series& series = chart.series[s];
    const std::string part = chart.series.size() > 1 ? fmt::format(", {}", series.name) : "";
    svg.rect(box, "seg " + series.css, fmt::format("{}{}: {}", bar.row.name, part, chart.value_text(bar.values[s])));
  }
  draw_name(svg, layout, index, bar.row);
  draw_text_after(svg, layout, index, bar.row, scale(begin));
}

}  // namespace

std::string draw(const BarChart& chart, Width width) {
  Svg svg(drawn_width(width), svg_head(chart.text, width));
  std::vector<NamedRow> rows;
  for (const Bar& bar : chart.bars) rows.push_back(bar.row);
  const std::span<const Series> legend(chart.series.data(), chart.series.size() > 1 ? chart.series.size() : 0);
  const double top = draw_legend(svg, legend, {4, 0}, drawn_width(width) - 8) + 4;
  const RowLayout layout = lay_out_rows(rows, width, top);
  const Interval vertical{.begin = top, .end = layout.bottom(rows.size()) + 2};

  const int most_ticks = width == Width::kWide ? 7 : 5;
  const Interval domain{.begin = 0, .end = chart.axis_end.value_or(longest(chart))};
  const Scale scale(domain, layout.plot);
  const std::vector<double> at = ticks(domain, most_ticks);
  const double bottom =
      draw_axis(svg, {.scale = scale, .ticks = at, .label = chart.axis, .tick_text = chart.tick_text}, vertical);
  for (std::size_t i = 0; i < rows.size(); ++i) draw_bar(svg, chart, layout, scale, i);
  if (chart.reference) {
    const double x = scale(*chart.reference);
    svg.line({x, vertical.begin}, {x, vertical.end}, "reference");
  }
  return svg.to_string(bottom);
}

}  // namespace foremoe::report
