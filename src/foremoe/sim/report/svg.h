#pragma once

// A drawing, written as SVG element by element. Looks are classes of data/report/style.css; no attribute is a style, so
// that the page's content security policy can forbid them.

#include <span>
#include <string>
#include <string_view>

namespace foremoe::report {

struct Point {
  double x = 0;
  double y = 0;
};

struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

enum class Anchor { kStart, kMiddle, kEnd };

struct TextLook {
  Anchor anchor = Anchor::kStart;
  std::string_view css = {};
  bool upwards = false;         // turned by a quarter, to be read from below
  std::string_view whole = {};  // of a shortened text: what it says in full, on hovering
};

struct SvgHead {
  std::string id;  // unique in the page
  std::string title;
  std::string description;
  std::string css;  // classes of the element
};

// The font sizes of style.css, in units of the drawing: what layout counts with.
inline constexpr double kFontSize = 12;
inline constexpr double kSmallFontSize = 11;

class Svg {
 public:
  Svg(double width, const SvgHead& head);

  void rect(const Box& box, std::string_view css, std::string_view tooltip = {});
  void line(Point from, Point to, std::string_view css);
  void polyline(std::span<const Point> points, std::string_view css);
  void circle(Point center, double radius, std::string_view css, std::string_view tooltip = {});
  void polygon(std::span<const Point> points, std::string_view css, std::string_view tooltip = {});
  void text(Point at, std::string_view text, const TextLook& look = {});
  // Many boxes of one look and no tooltip, as one path.
  void boxes(std::span<const Box> boxes, std::string_view css);

  double width() const { return width_; }
  std::string to_string(double height) const;

 private:
  void close(std::string_view element, std::string_view tooltip);

  double width_;
  std::string head_;
  std::string body_;
};

}  // namespace foremoe::report
