// Load per rank before and after, by micro-step.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "foremoe/sim/report/heat_map.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

constexpr std::array<double, 8> kBounds{0.5, 0.8, 0.95, 1.05, 1.25, 1.5, 2, 3};  // of load ÷ mean
constexpr std::size_t kMostCells = 64;                                           // along one axis

// Load ÷ mean of its micro-step, [cell row][cell column]: of several ranks or micro-steps in one cell the largest.
struct RelativeLoad {
  Array<double, 2> value;
  std::size_t rows_per_cell = 1;
  std::size_t columns_per_cell = 1;
};

RelativeLoad relative_load(const Array<std::int64_t, 2>& tokens) {
  const std::size_t rows = tokens.extent(0);
  const std::size_t columns = tokens.extent(1);
  const std::size_t down = (rows + kMostCells - 1) / kMostCells;
  const std::size_t right = (columns + kMostCells - 1) / kMostCells;
  RelativeLoad out{.value = Array<double, 2>({(rows + down - 1) / down, (columns + right - 1) / right}),
                   .rows_per_cell = down,
                   .columns_per_cell = right};
  for (std::size_t r = 0; r < rows; ++r) {
    std::int64_t sum = 0;
    for (std::size_t c = 0; c < columns; ++c) sum += tokens(r, c);
    if (sum == 0) continue;
    const double mean = static_cast<double>(sum) / static_cast<double>(columns);
    for (std::size_t c = 0; c < columns; ++c) {
      double& cell = out.value(r / down, c / right);
      cell = std::max(cell, static_cast<double>(tokens(r, c)) / mean);
    }
  }
  return out;
}

std::string grouped(std::size_t step, std::string_view noun) {
  return step > 1 ? fmt::format("{}s, {} in a cell: the most loaded", noun, step) : std::string(noun);
}

struct Side {
  std::string id;
  const std::string& policy;
  const RelativeLoad& load;
};

HeatMap heat_map(const Report& report, const Side& side) {
  const RelativeLoad& load = side.load;
  const auto flat = load.value.flat();
  const double most = *std::max_element(flat.begin(), flat.end());
  HeatMap map{
      .text = {.id = side.id,
               .title = fmt::format("Load per rank and micro-step, {}", side.policy),
               .description = fmt::format("Columns are ranks, rows micro-steps; the largest load is {} times the "
                                          "mean of its micro-step.",
                                          ratio_text(most))},
      .rows = {.label = grouped(load.rows_per_cell, "micro-step"), .step = static_cast<int>(load.rows_per_cell)},
      .columns = {.label = grouped(load.columns_per_cell, "rank"), .step = static_cast<int>(load.columns_per_cell)},
      .bin = Array<int, 2>(load.value.shape()),
      .bounds = {},
      .least = "below the mean",
      .most = "above the mean",
      .colours = "h",
      .cell_text = {}};
  const int per_node = report.ranks_per_node / static_cast<int>(load.columns_per_cell);
  if (per_node > 1 && report.num_nodes() > 1) map.columns.separate = per_node;
  for (const double bound : kBounds) map.bounds.push_back(tick_text(bound));
  std::transform(flat.begin(), flat.end(), map.bin.flat().begin(), [](double v) { return bin_of(v, kBounds); });
  map.cell_text = [&load](std::size_t r, std::size_t c) {
    return fmt::format("micro-step {}, rank {}: {} × mean", r * load.rows_per_cell, c * load.columns_per_cell,
                       ratio_text(load.value(r, c)));
  };
  return map;
}

HtmlTable numbers(const Side& side) {
  HtmlTable table{.caption = fmt::format("load ÷ mean per micro-step and rank, {}", side.policy),
                  .head = {"micro-step"},
                  .rows = {}};
  const RelativeLoad& load = side.load;
  for (std::size_t c = 0; c < load.value.extent(1); ++c) {
    table.head.push_back(fmt::format("{}", c * load.columns_per_cell));
  }
  for (std::size_t r = 0; r < load.value.extent(0); ++r) {
    std::vector<std::string> row{fmt::format("{}", r * load.rows_per_cell)};
    for (const double value : load.value.row(r)) row.push_back(fmt::format("{:.2f}", value));
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::string picture(const Report& report, const Side& side) {
  const auto flat = side.load.value.flat();
  const double most = flat.empty() ? 0 : *std::max_element(flat.begin(), flat.end());
  return "<div>\n" +
         figure(heat_map(report, side), fmt::format("{}: at most {} times the mean", side.policy, ratio_text(most))) +
         folded(numbers(side)) + "</div>\n";
}

}  // namespace

HtmlSection load_section(const Report& report) {
  if (!report.loads || report.loads->before.empty() || report.loads->after.empty()) return {};
  const RelativeLoad before = relative_load(report.loads->before);
  const auto loaded = before.value.flat();
  if (std::ranges::none_of(loaded, [](double value) { return value > 0; })) return {};  // no load
  const RelativeLoad after = relative_load(report.loads->after);
  std::string body = paragraph(fmt::format(
      "Tokens of each rank ÷ mean of all ranks, in layer {}, the one that {} balances worst on average. Orange and red "
      "are ranks that others wait for, blue ones wait.",
      report.loads->layer, report.before));
  body += side_by_side(picture(report, {.id = "load-before", .policy = report.before, .load = before}),
                       picture(report, {.id = "load-after", .policy = report.after, .load = after}));
  return {.id = "load", .heading = "Load per rank, before and after", .body = std::move(body), .wide = true};
}

}  // namespace foremoe::report
