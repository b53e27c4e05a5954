#include "foremoe/sim/report/scatter_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "foremoe/sim/report/html_text.h"

namespace foremoe::report {
namespace {

constexpr double kSize = 5.5;  // half of a mark

Interval extent(const std::vector<ScatterPoint>& points, double ScatterPoint::*value) {
  Interval all{.begin = points.empty() ? 0 : points.front().*value, .end = points.empty() ? 1 : points.front().*value};
  for (const ScatterPoint& p : points) all = {std::min(all.begin, p.*value), std::max(all.end, p.*value)};
  const double margin = all.length() > 0 ? 0.06 * all.length() : std::max(1e-6, 0.05 * std::abs(all.begin));
  return {.begin = all.begin - margin, .end = all.end + margin};
}

void draw_mark(Svg& svg, Point at, int shape, const std::string& css, const std::string& tooltip) {
  const double s = kSize;
  if (shape == 1) {
    svg.rect({at.x - s * 0.9, at.y - s * 0.9, s * 1.8, s * 1.8}, css, tooltip);
  } else if (shape == 2) {
    const std::array<Point, 3> up{
        Point{at.x, at.y - s * 1.15}, {at.x + s * 1.15, at.y + s}, {at.x - s * 1.15, at.y + s}};
    svg.polygon(up, css, tooltip);
  } else if (shape == 3) {
    const double d = s * 1.25;
    const std::array<Point, 4> diamond{Point{at.x, at.y - d}, {at.x + d, at.y}, {at.x, at.y + d}, {at.x - d, at.y}};
    svg.polygon(diamond, css, tooltip);
  } else {
    svg.circle(at, s, css, tooltip);
  }
}

bool overlap(const Box& a, const Box& b) {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}

// Beside each mark at the first of eight places that touches no mark, no label before it and not the border; a label
// that finds none is left out: the table has it.
void draw_labels(Svg& svg, const ScatterChart& chart, std::span<const Point> marks, const Box& frame) {
  std::vector<Box> taken;
  for (const Point& m : marks) taken.push_back({m.x - kSize, m.y - kSize, 2 * kSize, 2 * kSize});
  for (std::size_t i = 0; i < marks.size(); ++i) {
    const double width = text_width(chart.points[i].label, kSmallFontSize);
    const double right = marks[i].x + 9;
    const double left = marks[i].x - 9 - width;
    const double middle = marks[i].x - width / 2;
    const double y = marks[i].y - 6;
    const std::array<Point, 8> places{Point{right, y}, {left, y},      {middle, y - 13}, {middle, y + 14},
                                      {right, y - 11}, {left, y - 11}, {right, y + 11},  {left, y + 11}};
    for (const Point& place : places) {
      const Box box{place.x, place.y, width, 12};
      const bool inside = box.x >= frame.x + 2 && box.x + box.width <= frame.x + frame.width - 2 && box.y >= frame.y &&
                          box.y + box.height <= frame.y + frame.height;
      const bool free = std::none_of(taken.begin(), taken.end(), [&](const Box& other) { return overlap(box, other); });
      if (!inside || !free) continue;
      taken.push_back(box);
      svg.text({place.x, place.y + 10}, chart.points[i].label, {.css = "small halo"});
      break;
    }
  }
}

void draw_front(Svg& svg, const ScatterChart& chart, std::span<const Point> marks, const Box& frame) {
  std::vector<Point> line;
  for (const std::size_t i : pareto_front(chart.points)) {
    if (!line.empty()) line.push_back({marks[i].x, line.back().y});
    line.push_back(marks[i]);
  }
  if (line.empty()) return;
  line.push_back({frame.x + frame.width, line.back().y});
  svg.polyline(line, "front");
}

}  // namespace

std::vector<std::size_t> pareto_front(std::span<const ScatterPoint> points) {
  std::vector<std::size_t> order(points.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return points[a].x != points[b].x ? points[a].x < points[b].x : points[a].y > points[b].y;
  });
  std::vector<std::size_t> front;
  for (const std::size_t i : order) {
    if (front.empty() || points[i].y > points[front.back()].y) front.push_back(i);
  }
  return front;
}

std::string draw(const ScatterChart& chart, Width width) {
  Svg svg(drawn_width(width), svg_head(chart.text, width));
  const auto mark = [&](Svg& to, Point middle, std::size_t series) {
    draw_mark(to, middle, static_cast<int>(series), "mark " + chart.series[series].css, {});
  };
  const double top = draw_legend(svg, chart.series, {4, 0}, drawn_width(width) - 8, mark) + 4;
  const double left = 62;
  const Box frame{left, top, drawn_width(width) - left - 8, width == Width::kWide ? 280.0 : 230.0};
  const Scale x(extent(chart.points, &ScatterPoint::x), {.begin = frame.x, .end = frame.x + frame.width});
  const Scale y(extent(chart.points, &ScatterPoint::y), {.begin = frame.y + frame.height, .end = frame.y});

  for (const double tick : ticks(y.domain(), 7)) {
    svg.line({frame.x, y(tick)}, {frame.x + frame.width, y(tick)}, "grid");
    svg.text({frame.x - 6, y(tick) + 4}, chart.y_text(tick), {.anchor = Anchor::kEnd, .css = "tick"});
  }
  svg.text({13, frame.y + frame.height / 2}, chart.y_axis,
           {.anchor = Anchor::kMiddle, .css = "label", .upwards = true});
  const std::vector<double> x_ticks = ticks(x.domain(), width == Width::kWide ? 7 : 4);
  const double bottom = draw_axis(svg, {.scale = x, .ticks = x_ticks, .label = chart.x_axis, .tick_text = chart.x_text},
                                  {.begin = frame.y, .end = frame.y + frame.height});

  std::vector<Point> marks;
  for (const ScatterPoint& p : chart.points) marks.push_back({x(p.x), y(p.y)});
  draw_front(svg, chart, marks, frame);
  for (std::size_t i = 0; i < marks.size(); ++i) {
    const ScatterPoint& p = chart.points[i];
    draw_mark(svg, marks[i], p.series, "mark " + chart.series[static_cast<std::size_t>(p.series)].css, p.tooltip);
  }
  draw_labels(svg, chart, marks, frame);
  return svg.to_string(bottom);
}

}  // namespace foremoe::report
