#pragma once

// What the charts have in common. Each is drawn twice, for a wide and for a narrow screen, at sizes at which its text
// can be read; the style sheet shows the one that fits.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "foremoe/sim/report/scale.h"
#include "foremoe/sim/report/svg.h"

namespace foremoe::report {

enum class Width { kNarrow, kWide };

// Units of the drawing, which are pixels where it is shown at its own size.
constexpr double drawn_width(Width width) { return width == Width::kWide ? 680 : 344; }

struct ChartText {
  std::string id;           // unique in the page
  std::string title;        // what it shows
  std::string description;  // what one sees in it, with the numbers, for who cannot see it
};

// A colour with its meaning.
struct Series {
  std::string name;
  std::string css;  // the class of style.css: "s0" … "s9", and so on
};

using NumberText = std::function<std::string(double)>;

SvgHead svg_head(const ChartText& text, Width width);

// Colours and names, in as many lines as they need below `top`. Returns where the last line ends.
using LegendMark = std::function<void(Svg& svg, Point middle, std::size_t series)>;  // none: a small box
double draw_legend(Svg& svg, std::span<const Series> series, Point top, double width, const LegendMark& mark = {});

// A horizontal axis: grid lines over `plot` at the ticks, their values and the label below. Returns where the label
// ends.
struct HorizontalAxis {
  const Scale& scale;
  std::span<const double> ticks;
  std::string label;
  NumberText tick_text;
};
double draw_axis(Svg& svg, const HorizontalAxis& axis, Interval vertical);

// Rows with a name each: beside their part of the plot where there is room, else above it.
struct NamedRow {
  std::string name;
  std::string text;  // at the end of what is drawn
  bool strong = false;
};
struct RowLayout {
  double top = 0;
  double row_height = 0;
  double bar_offset = 0;  // from the row's top to what is drawn
  double bar_height = 0;
  Interval plot;  // horizontal, without the room for the rows' texts
  double name_width = 0;
  bool name_above = false;

  double bar_top(std::size_t row) const { return top + row_height * static_cast<double>(row) + bar_offset; }
  double bottom(std::size_t rows) const { return top + row_height * static_cast<double>(rows); }
};
RowLayout lay_out_rows(std::span<const NamedRow> rows, Width width, double top);
void draw_name(Svg& svg, const RowLayout& layout, std::size_t index, const NamedRow& row);
// The row's text, right of `x`.
void draw_text_after(Svg& svg, const RowLayout& layout, std::size_t index, const NamedRow& row, double x);

}  // namespace foremoe::report
