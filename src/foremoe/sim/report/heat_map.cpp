#include "foremoe/sim/report/heat_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "foremoe/sim/report/html_text.h"

namespace foremoe::report {
namespace {

struct Grid {
  Box frame;
  double cell_width = 0;
  double cell_height = 0;

  Box cell(std::size_t row, std::size_t column) const {
    return {frame.x + cell_width * static_cast<double>(column), frame.y + cell_height * static_cast<double>(row),
            cell_width, cell_height};
  }
};

// One box of every colour in a row, the bounds between them below, then what the ends mean.
double draw_colours(Svg& svg, const HeatMap& map) {
  const std::size_t bins = map.bounds.size() + 1;
  double widest = 30;
  for (const std::string& bound : map.bounds) widest = std::max(widest, text_width(bound, kSmallFontSize) + 12);
  const double box = std::min(widest, (svg.width() - 8) / static_cast<double>(bins));
  const double end = 4 + box * static_cast<double>(bins);
  for (std::size_t i = 0; i < bins; ++i) {
    svg.rect({4 + box * static_cast<double>(i), 18, box, 12}, fmt::format("cell {}{}", map.colours, i));
    if (i > 0) {
      svg.text({4 + box * static_cast<double>(i), 43}, map.bounds[i - 1], {.anchor = Anchor::kMiddle, .css = "tick"});
    }
  }
  svg.text({4, 13}, map.least, {.css = "small"});
  svg.text({end, 13}, map.most, {.anchor = Anchor::kEnd, .css = "small"});
  return 50;
}

void draw_cells(Svg& svg, const HeatMap& map, const Grid& grid, Width width) {
  const std::size_t rows = map.bin.extent(0);
  const std::size_t columns = map.bin.extent(1);
  if (width == Width::kWide) {
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < columns; ++c) {
        svg.rect(grid.cell(r, c), fmt::format("cell {}{}", map.colours, map.bin(r, c)), map.cell_text(r, c));
      }
    }
    return;
  }
  for (std::size_t bin = 0; bin <= map.bounds.size(); ++bin) {  // nobody hovers on a narrow screen
    std::vector<Box> boxes;
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < columns; ++c) {
        if (map.bin(r, c) == static_cast<int>(bin)) boxes.push_back(grid.cell(r, c));
      }
    }
    svg.boxes(boxes, fmt::format("cell {}{}", map.colours, bin));
  }
}

// Every so many cells, so that the numbers do not touch.
std::size_t label_step(std::size_t cells, double cell, double label, int separate) {
  std::size_t step = separate > 1 ? static_cast<std::size_t>(separate) : 1;
  if (step * cell > 90) step = 1;
  while (static_cast<double>(step) * cell < label && step < cells) step *= 2;
  return step;
}

void draw_axes(Svg& svg, const HeatMap& map, const Grid& grid) {
  const std::size_t rows = map.bin.extent(0);
  const std::size_t columns = map.bin.extent(1);
  const std::size_t down = label_step(rows, grid.cell_height, 15, map.rows.separate);
  for (std::size_t r = 0; r < rows; r += down) {
    const Box cell = grid.cell(r, 0);
    svg.text({grid.frame.x - 5, cell.y + cell.height / 2 + 4}, fmt::format("{}", r * map.rows.step),
             {.anchor = Anchor::kEnd, .css = "tick"});
  }
  const std::size_t right = label_step(columns, grid.cell_width, 26, map.columns.separate);
  for (std::size_t c = 0; c < columns; c += right) {
    const Box cell = grid.cell(0, c);
    svg.text({cell.x + cell.width / 2, grid.frame.y + grid.frame.height + 15}, fmt::format("{}", c * map.columns.step),
             {.anchor = Anchor::kMiddle, .css = "tick"});
  }
  if (map.columns.separate > 0) {
    for (std::size_t c = map.columns.separate; c < columns; c += map.columns.separate) {
      const double x = grid.cell(0, c).x;
      svg.line({x, grid.frame.y}, {x, grid.frame.y + grid.frame.height}, "between");
    }
  }
  svg.text({grid.frame.x + grid.frame.width / 2, grid.frame.y + grid.frame.height + 33}, map.columns.label,
           {.anchor = Anchor::kMiddle, .css = "label"});
  svg.text({13, grid.frame.y + grid.frame.height / 2}, map.rows.label,
           {.anchor = Anchor::kMiddle, .css = "label", .upwards = true});
}

}  // namespace

int bin_of(double value, std::span<const double> bounds) {
  return static_cast<int>(std::upper_bound(bounds.begin(), bounds.end(), value) - bounds.begin());
}

std::string draw(const HeatMap& map, Width width) {
  // A square one is small: two of them fit where one other chart does.
  Svg svg(drawn_width(map.square ? Width::kNarrow : width), svg_head(map.text, width));
  const auto rows = static_cast<double>(map.bin.extent(0));
  const auto columns = static_cast<double>(map.bin.extent(1));
  const double top = draw_colours(svg, map) + 4;
  const double left = 44;
  const double room = svg.width() - left - 8;
  const double highest = width == Width::kWide ? 360 : 300;  // of the grid
  Grid grid;
  grid.cell_width = room / columns;
  grid.cell_height = std::clamp((width == Width::kWide ? 260 : 220) / rows, 4.0, 24.0);
  if (map.square) {
    grid.cell_width = std::min({room / columns, highest / rows, 44.0});
    grid.cell_height = grid.cell_width;
  }
  grid.frame = {left, top, grid.cell_width * columns, grid.cell_height * rows};
  draw_cells(svg, map, grid, width);
  draw_axes(svg, map, grid);
  return svg.to_string(grid.frame.y + grid.frame.height + 40);
}

}  // namespace foremoe::report
