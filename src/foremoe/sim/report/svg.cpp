#include "foremoe/sim/report/svg.h"

#include <fmt/format.h>

#include <cmath>

#include "foremoe/sim/report/html_text.h"

namespace foremoe::report {
namespace {

// Tenths are finer than any screen; what is no number is drawn at 0.
std::string number(double value) {
  if (!std::isfinite(value)) return "0";
  const double tenths = std::round(value * 10);
  return fmt::format("{:.{}f}", tenths == 0 ? 0.0 : tenths / 10, std::fmod(tenths, 10) == 0 ? 0 : 1);
}

std::string points_attribute(std::span<const Point> points) {
  std::string out;
  for (const Point& p : points) out += fmt::format("{}{},{}", out.empty() ? "" : " ", number(p.x), number(p.y));
  return out;
}

std::string_view word(Anchor anchor) {
  return anchor == Anchor::kStart ? "start" : anchor == Anchor::kMiddle ? "middle" : "end";
}

}  // namespace

Svg::Svg(double width, const SvgHead& head)
    : width_(width),
      head_(fmt::format("class=\"{1}\" role=\"img\" aria-labelledby=\"{0}-t {0}-d\"><title id=\"{0}-t\">{2}</title>"
                        "<desc id=\"{0}-d\">{3}</desc>\n",
                        escaped(head.id), escaped(head.css), escaped(head.title), escaped(head.description))) {}

void Svg::close(std::string_view element, std::string_view tooltip) {
  if (tooltip.empty()) {
    body_ += "/>\n";
  } else {
    body_ += fmt::format("><title>{}</title></{}>\n", escaped(tooltip), element);
  }
}

void Svg::rect(const Box& box, std::string_view css, std::string_view tooltip) {
  body_ += fmt::format("<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"", css, number(box.x),
                       number(box.y), number(box.width), number(box.height));
  close("rect", tooltip);
}

void Svg::line(Point from, Point to, std::string_view css) {
  body_ += fmt::format("<line class=\"{}\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"", css, number(from.x),
                       number(from.y), number(to.x), number(to.y));
  close("line", {});
}

void Svg::polyline(std::span<const Point> points, std::string_view css) {
  body_ += fmt::format("<polyline class=\"{}\" points=\"{}\"", css, points_attribute(points));
  close("polyline", {});
}

void Svg::circle(Point center, double radius, std::string_view css, std::string_view tooltip) {
  body_ += fmt::format("<circle class=\"{}\" cx=\"{}\" cy=\"{}\" r=\"{}\"", css, number(center.x), number(center.y),
                       number(radius));
  close("circle", tooltip);
}

void Svg::polygon(std::span<const Point> points, std::string_view css, std::string_view tooltip) {
  body_ += fmt::format("<polygon class=\"{}\" points=\"{}\"", css, points_attribute(points));
  close("polygon", tooltip);
}

void Svg::text(Point at, std::string_view text, const TextLook& look) {
  const std::string turned =
      look.upwards ? fmt::format(" transform=\"rotate(-90 {} {})\"", number(at.x), number(at.y)) : "";
  body_ += fmt::format("<text class=\"{}\" x=\"{}\" y=\"{}\" text-anchor=\"{}\"{}>{}", look.css, number(at.x),
                       number(at.y), word(look.anchor), turned, escaped(text));
  if (!look.whole.empty() && look.whole != text) body_ += fmt::format("<title>{}</title>", escaped(look.whole));
  body_ += "</text>\n";
}

void Svg::boxes(std::span<const Box> boxes, std::string_view css) {
  if (boxes.empty()) return;
  body_ += fmt::format("<path class=\"{}\" d=\"", css);
  for (const Box& b : boxes) {
    body_ +=
        fmt::format("M{},{}h{}v{}h{}z", number(b.x), number(b.y), number(b.width), number(b.height), number(-b.width));
  }
  body_ += "\"/>\n";
}

std::string Svg::to_string(double height) const {
  return fmt::format("<svg viewBox=\"0 0 {} {}\" {}{}</svg>\n", number(width_), number(height), head_, body_);
}

}  // namespace foremoe::report
