#include "foremoe/sim/report/chart.h"

#include <algorithm>

#include "foremoe/sim/report/html_text.h"

namespace foremoe::report {
namespace {

constexpr double kLegendLine = 20;
constexpr double kLegendBox = 11;
constexpr double kMargin = 4;
constexpr double kWidestName = 160;

std::string_view name_look(bool strong) { return strong ? "name strong" : "name"; }

}  // namespace

SvgHead svg_head(const ChartText& text, Width width) {
  const bool wide = width == Width::kWide;
  return {.id = text.id + (wide ? "-wide" : "-narrow"),
          .title = text.title,
          .description = text.description,
          .css = wide ? "chart wide" : "chart narrow"};
}

double draw_legend(Svg& svg, std::span<const Series> series, Point top, double width, const LegendMark& mark) {
  Point at = top;
  for (std::size_t i = 0; i < series.size(); ++i) {
    const std::string name = fitted(series[i].name, kSmallFontSize, width - kLegendBox - 6);
    const double length = kLegendBox + 5 + text_width(name, kSmallFontSize) + 14;
    if (at.x > top.x && at.x + length - 14 > top.x + width) at = {top.x, at.y + kLegendLine};
    if (mark) {
      mark(svg, {at.x + kLegendBox / 2, at.y + 4 + kLegendBox / 2}, i);
    } else {
      svg.rect({at.x, at.y + 4, kLegendBox, kLegendBox}, "seg " + series[i].css);
    }
    svg.text({at.x + kLegendBox + 5, at.y + 13.5}, name, {.css = "small", .whole = series[i].name});
    at.x += length;
  }
  return at.y + (series.empty() ? 0 : kLegendLine);
}

double draw_axis(Svg& svg, const HorizontalAxis& axis, Interval vertical) {
  const double below = vertical.end + 15;
  for (const double tick : axis.ticks) {
    const double x = axis.scale(tick);
    svg.line({x, vertical.begin}, {x, vertical.end}, "grid");
    svg.text({x, below}, axis.tick_text(tick), {.anchor = Anchor::kMiddle, .css = "tick"});
  }
  const Interval& range = axis.scale.range();
  svg.line({range.begin, vertical.end}, {range.end, vertical.end}, "axis");
  const double half = text_width(axis.label, kFontSize) / 2;
  const double middle =
      std::clamp((range.begin + range.end) / 2, half + kMargin, std::max(half + kMargin, svg.width() - half - kMargin));
  svg.text({middle, below + 18}, axis.label, {.anchor = Anchor::kMiddle, .css = "label"});
  return below + 24;
}

RowLayout lay_out_rows(std::span<const NamedRow> rows, Width width, double top) {
  double names = 0;
  double texts = 0;
  for (const NamedRow& row : rows) {
    names = std::max(names, text_width(row.name, kFontSize));
    texts = std::max(texts, text_width(row.text, kSmallFontSize));
  }
  RowLayout layout{.top = top, .plot = {}};
  layout.name_above = width == Width::kNarrow;
  layout.name_width = layout.name_above ? drawn_width(width) - 2 * kMargin : std::min(names * 1.04, kWidestName);
  layout.row_height = layout.name_above ? 36 : 25;
  layout.bar_offset = layout.name_above ? 18 : 4;
  layout.bar_height = layout.name_above ? 14 : 17;
  const double text_room = texts == 0 ? 12 : texts + 14;
  layout.plot = {.begin = layout.name_above ? 10 : kMargin + layout.name_width + 10,
                 .end = drawn_width(width) - kMargin - text_room};
  return layout;
}

void draw_name(Svg& svg, const RowLayout& layout, std::size_t index, const NamedRow& row) {
  const double middle = layout.bar_top(index) + layout.bar_height / 2;
  const std::string name = fitted(row.name, kFontSize, layout.name_width + 1);
  const TextLook look{
      .anchor = layout.name_above ? Anchor::kStart : Anchor::kEnd, .css = name_look(row.strong), .whole = row.name};
  const Point at = layout.name_above ? Point{layout.plot.begin, layout.bar_top(index) - 4}
                                     : Point{layout.plot.begin - 8, middle + 4};
  svg.text(at, name, look);
}

void draw_text_after(Svg& svg, const RowLayout& layout, std::size_t index, const NamedRow& row, double x) {
  if (row.text.empty()) return;
  svg.text({x + 6, layout.bar_top(index) + layout.bar_height / 2 + 4}, row.text,
           {.css = row.strong ? "small strong" : "small"});
}

}  // namespace foremoe::report
