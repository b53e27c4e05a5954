// What more guest slots buy, and what they cost.

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/scatter_chart.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

// The unit in which all are told, so that ticks need none.
struct MemoryUnit {
  double bytes = 1;
  std::string name;
};

MemoryUnit unit_of(const std::vector<MemoryPoint>& points) {
  double most = 0;
  for (const MemoryPoint& p : points) most = std::max(most, p.memory_bytes);
  if (most >= 2e9) return {.bytes = 1e9, .name = "GB"};
  if (most >= 2e6) return {.bytes = 1e6, .name = "MB"};
  return {.bytes = 1e3, .name = "kB"};
}

}  // namespace

HtmlSection memory_section(const Report& report) {
  if (report.memory.empty()) return {};
  const MemoryUnit unit = unit_of(report.memory);
  ScatterChart chart{.text = {.id = "memory", .title = "Memory against speedup", .description = {}},
                     .x_axis = fmt::format("memory of the fullest rank, {}", unit.name),
                     .y_axis = fmt::format("times as fast as {}", report.before),
                     .series = {},
                     .points = {},
                     .x_text = tick_text,
                     .y_text = tick_text};
  for (const MemoryPoint& p : report.memory) {
    const auto at =
        std::find_if(chart.series.begin(), chart.series.end(), [&](const Series& s) { return s.name == p.residency; });
    const auto series = static_cast<int>(at - chart.series.begin());
    if (at == chart.series.end()) {
      chart.series.push_back({.name = p.residency, .css = fmt::format("p{}", chart.series.size())});
    }
    chart.points.push_back({.x = p.memory_bytes / unit.bytes,
                            .y = p.speedup,
                            .series = series,
                            .label = fmt::format("{}", p.guest_slots),
                            .tooltip = fmt::format("{}, {} guest slots: {}, {}", p.residency, p.guest_slots,
                                                   bytes_text(p.memory_bytes), times_text(p.speedup))});
  }
  HtmlTable table{.caption = "memory and speedup by residency and guest slots",
                  .head = {"residency", "guest slots", "speedup", "memory", "guests", "ρ mean", "copies",
                           "waits for copies", "on the front"},
                  .rows = {}};
  const std::vector<std::size_t> front = pareto_front(chart.points);
  for (std::size_t i = 0; i < report.memory.size(); ++i) {
    const MemoryPoint& p = report.memory[i];
    const bool on_front = std::find(front.begin(), front.end(), i) != front.end();
    table.rows.push_back({p.residency, fmt::format("{}", p.guest_slots), times_text(p.speedup),
                          bytes_text(p.memory_bytes), bytes_text(p.guest_bytes), ratio_text(p.rho_mean),
                          fmt::format("{:.2f}", p.copies_per_layer_event), seconds_text(p.exposed_copy_seconds),
                          on_front ? "yes" : "no"});
    if (on_front) chart.text.description += chart.points[i].tooltip + ". ";
  }
  return {
      .id = "memory",
      .heading = "Memory against speedup",
      .body = figure(chart, fmt::format("{}, by where guests stay; numbers at the marks are guest slots per rank and "
                                        "layer. The line is the front: nothing is quicker with as little memory.",
                                        report.after)) +
              folded(table)};
}

}  // namespace foremoe::report
