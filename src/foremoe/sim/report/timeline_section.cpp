// What some ranks did while one layer ran.

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/sim/report/lane_chart.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

struct Unit {
  double seconds = 1;
  std::string name;
};

Unit unit_of(double seconds) {
  if (seconds >= 2) return {.seconds = 1, .name = "seconds"};
  if (seconds >= 2e-3) return {.seconds = 1e-3, .name = "milliseconds"};
  return {.seconds = 1e-6, .name = "microseconds"};
}

std::string colour_of(const std::string& kind, std::size_t index) {
  if (kind == "waiting") return "idle";
  if (kind == "dense") return "s0";
  if (kind == "dispatch") return "s1";
  if (kind == "experts") return "s2";
  if (kind == "combine") return "s3";
  if (kind == "planning") return "s4";
  if (kind == "waiting for copies") return "s5";
  if (kind == "copies from the host") return "s6";
  if (kind == "copies from peers") return "s7";
  return fmt::format("s{}", index % 10);
}

// Kinds of all windows, in the order of their first occurrence, so that both have the same legend.
std::vector<Series> kinds(const Report& report) {
  std::vector<Series> series;
  for (const TimelineWindow& w : report.timelines) {
    for (const TimelineLane& lane : w.lanes) {
      for (const TimelineSpan& span : lane.spans) {
        const bool known =
            std::any_of(series.begin(), series.end(), [&](const Series& s) { return s.name == span.kind; });
        if (!known) series.push_back({.name = span.kind, .css = colour_of(span.kind, series.size())});
      }
    }
  }
  return series;
}

struct Shared {
  std::vector<Series> series;
  Unit unit;
  double end = 0;  // seconds: both windows on one scale
};

std::string window(const TimelineWindow& w, std::size_t index, const Shared& shared) {
  LaneChart chart{.text = {.id = fmt::format("timeline-{}", index),
                           .title = fmt::format("Timeline, {}", w.policy),
                           .description = fmt::format("{}: {}.", w.what, seconds_text(w.seconds))},
                  .axis = shared.unit.name,
                  .series = shared.series,
                  .lanes = {},
                  .end = shared.end,
                  .tick_text = [&shared](double v) { return tick_text(v / shared.unit.seconds); },
                  .value_text = seconds_text};
  HtmlTable table{.caption = fmt::format("what the ranks did, {}", w.policy),
                  .head = {"rank", "what", "begins", "ends"},
                  .rows = {}};
  for (const TimelineLane& lane : w.lanes) {
    ChartLane drawn{.name = lane.name, .spans = {}};
    for (const TimelineSpan& span : lane.spans) {
      const auto at =
          std::find_if(chart.series.begin(), chart.series.end(), [&](const Series& s) { return s.name == span.kind; });
      drawn.spans.push_back({.series = static_cast<int>(at - chart.series.begin()),
                             .begin = span.begin,
                             .end = span.end,
                             .beneath = span.beneath,
                             .name = span.name});
      table.rows.push_back({lane.name, span.name, seconds_text(span.begin), seconds_text(span.end)});
    }
    chart.lanes.push_back(std::move(drawn));
  }
  return "<div>\n" + figure(chart, fmt::format("{}, {}: {}", w.policy, w.what, seconds_text(w.seconds))) +
         folded(table) + "</div>\n";
}

}  // namespace

HtmlSection timeline_section(const Report& report) {
  if (report.timelines.empty()) return {};
  Shared shared{.series = kinds(report), .unit = {}, .end = 0};
  for (const TimelineWindow& w : report.timelines) shared.end = std::max(shared.end, w.seconds);
  shared.unit = unit_of(shared.end);
  std::string windows;
  for (std::size_t i = 0; i < report.timelines.size(); ++i) windows += window(report.timelines[i], i, shared);
  return {.id = "timeline",
          .heading = "One layer, rank by rank",
          .body = paragraph("The same layer of the same micro-step on one scale. Thin bars are copies that travel "
                            "meanwhile.") +
                  side_by_side(windows, {}),
          .wide = true};
}

}  // namespace foremoe::report
