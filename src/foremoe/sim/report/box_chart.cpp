#include "foremoe/sim/report/box_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "foremoe/sim/report/numbers.h"

namespace foremoe::report {
namespace {

double quantile(std::span<const double> sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(at));
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - std::floor(at)) * (sorted[above] - sorted[below]);
}

void draw_box(Svg& svg, const BoxChart& chart, const RowLayout& layout, const Scale& scale, std::size_t index) {
  const auto& [row, q] = chart.rows[index];
  const double top = layout.bar_top(index);
  const double middle = top + layout.bar_height / 2;
  const double bottom = top + layout.bar_height;
  const std::string_view look = row.strong ? "box strong" : "box";
  const auto say = [&](double value) { return chart.value_text(value); };

  svg.line({scale(q.least), middle}, {scale(q.most), middle}, "whisker");
  svg.line({scale(q.most), top + 4}, {scale(q.most), bottom - 4}, "whisker");
  const double width = std::max(2.0, scale(q.p75) - scale(q.p25));
  svg.rect({scale(q.p25), top + 1, width, layout.bar_height - 2}, look,
           fmt::format("{}: least {}, median {}, mean {}, 99 % up to {}, most {}", row.name, say(q.least),
                       say(q.median), say(q.mean), say(q.p99), say(q.most)));
  svg.line({scale(q.median), top + 1}, {scale(q.median), bottom - 1}, "median");
  svg.circle({scale(q.mean), middle}, 3, "mean");
  draw_name(svg, layout, index, row);
  draw_text_after(svg, layout, index, row, layout.plot.end);
}

}  // namespace

Quantiles quantiles(std::span<const double> values) {
  if (values.empty()) return {};
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  return {.least = sorted.front(),
          .p25 = quantile(sorted, 0.25),
          .median = quantile(sorted, 0.5),
          .p75 = quantile(sorted, 0.75),
          .p99 = quantile(sorted, 0.99),
          .most = sorted.back(),
          .mean = std::accumulate(sorted.begin(), sorted.end(), 0.0) / static_cast<double>(sorted.size())};
}

std::string draw(const BoxChart& chart, Width width) {
  Svg svg(drawn_width(width), svg_head(chart.text, width));
  std::vector<NamedRow> rows;
  double most = chart.begin * 1.05;
  for (const BoxRow& row : chart.rows) {
    rows.push_back(row.row);
    most = std::max(most, row.values.most);
  }
  const RowLayout layout = lay_out_rows(rows, width, 4);
  const Interval vertical{.begin = 4, .end = layout.bottom(rows.size()) + 2};
  const Interval domain{.begin = chart.begin, .end = most};
  const Scale scale(domain, layout.plot, Scale::Kind::kLogarithmic);
  const int most_ticks = width == Width::kWide ? 9 : 6;
  const std::vector<double> at = logarithmic_ticks(domain, most_ticks);
  const double bottom =
      draw_axis(svg, {.scale = scale, .ticks = at, .label = chart.axis, .tick_text = tick_text}, vertical);
  for (std::size_t i = 0; i < rows.size(); ++i) draw_box(svg, chart, layout, scale, i);
  return svg.to_string(bottom);
}

}  // namespace foremoe::report
