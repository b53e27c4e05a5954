// What a step's time is made of, and what each stage of our planner adds.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "foremoe/sim/report/bar_chart.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

constexpr std::size_t kColours = 10;  // s0 … s9
constexpr const char* kIdeal = "ideal";

using PhaseOf = PhaseTime PolicyResult::*;

// A part has one colour on the whole page.
struct Palette {
  std::vector<std::string> parts;

  explicit Palette(const Report& report) {
    for (const PolicyResult* p : planned(report)) {
      for (const PhaseOf phase : {&PolicyResult::recompute, &PolicyResult::policy_update}) {
        for (const TimePart& part : (p->*phase).parts) {
          if (part.seconds > 0 && std::find(parts.begin(), parts.end(), part.name) == parts.end()) {
            parts.push_back(part.name);
          }
        }
      }
    }
  }
};

// Those whose meaning asks for a colour have it, whatever else there is; the rest take what is left.
std::string colour_of(const std::string& part, std::size_t index) {
  constexpr std::array<std::string_view, kColours> kKnown{
      "dense",          "dispatch",      "experts",           "combine",   "planning",
      "exposed copies", "arena refresh", "exposed gradients", "optimizer", "homes moved"};
  const auto* const at = std::find(kKnown.begin(), kKnown.end(), part);
  return fmt::format("s{}", at != kKnown.end() ? static_cast<std::size_t>(at - kKnown.begin()) : index % kColours);
}

double seconds_of(const PhaseTime& time, const std::string& part) {
  double sum = 0;
  for (const TimePart& p : time.parts) sum += p.name == part ? p.seconds : 0;
  return sum;
}

struct Phase {
  PhaseOf member;
  std::string id;
  std::string name;
};

BarChart phase_chart(const Report& report, const Phase& phase, const Palette& palette) {
  const PolicyResult& before = *report.find(report.before);
  const double ideal = (before.*phase.member).ideal_seconds;
  BarChart chart{.text = {.id = "time-" + phase.id,
                          .title = fmt::format("Seconds of the {} by policy and part", phase.name),
                          .description = fmt::format("Ideal: {}. ", seconds_text(ideal))},
                 .axis = "seconds of the critical path",
                 .series = {},
                 .bars = {},
                 .value_text = seconds_text,
                 .tick_text = tick_text,
                 .reference = ideal,
                 .axis_end = {}};
  const auto here = [&](const std::string& part) {
    const auto all = planned(report);
    return std::any_of(all.begin(), all.end(),
                       [&](const PolicyResult* p) { return seconds_of(p->*phase.member, part) > 0; });
  };
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < palette.parts.size(); ++i) {
    if (!here(palette.parts[i])) continue;
    parts.push_back(palette.parts[i]);
    chart.series.push_back({.name = parts.back(), .css = colour_of(parts.back(), i)});
  }
  chart.series.push_back({.name = kIdeal, .css = "ideal"});
  Bar best{.row = {.name = kIdeal, .text = seconds_text(ideal)}, .values = std::vector<double>(parts.size(), 0.0)};
  best.values.push_back(ideal);
  chart.bars.push_back(std::move(best));
  const double before_seconds = (before.*phase.member).seconds();
  for (const PolicyResult* p : planned(report)) {
    const PhaseTime& time = p->*phase.member;
    Bar bar{.row = {.name = p->policy,
                    .text = fmt::format("{} · {}", seconds_text(time.seconds()),
                                        times_text(before_seconds / time.seconds())),
                    .strong = p->policy == report.after},
            .values = {}};
    for (const std::string& part : parts) bar.values.push_back(seconds_of(time, part));
    chart.text.description += fmt::format("{}: {}. ", p->policy, seconds_text(time.seconds()));
    chart.bars.push_back(std::move(bar));
  }
  return chart;
}

HtmlTable phase_table(const Report& report, const Phase& phase, const Palette& palette) {
  HtmlTable table{.caption = fmt::format("seconds of the {} by part", phase.name), .head = {"policy"}, .rows = {}};
  for (const std::string& part : palette.parts) table.head.push_back(part);
  for (const char* name : {"sum", kIdeal}) table.head.emplace_back(name);
  for (const PolicyResult* p : planned(report)) {
    const PhaseTime& time = p->*phase.member;
    std::vector<std::string> row{p->policy};
    for (const std::string& part : palette.parts) row.push_back(seconds_text(seconds_of(time, part)));
    row.push_back(seconds_text(time.seconds()));
    row.push_back(seconds_text(time.ideal_seconds));
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace

HtmlSection time_section(const Report& report) {
  if (report.find(report.before) == nullptr) return {};
  const Palette palette(report);
  if (palette.parts.empty()) return {};
  const auto part = [&](const Phase& phase, std::string_view heading) {
    return "<div>\n" +
           figure(phase_chart(report, phase, palette),
                  fmt::format("{}; dashed: every rank at the mean load, nothing copied", heading)) +
           folded(phase_table(report, phase, palette)) + "</div>\n";
  };
  return {.id = "time",
          .heading = "Where the time goes",
          .body = side_by_side(
              part({.member = &PolicyResult::recompute, .id = "recompute", .name = "recompute stage"}, "Recompute"),
              part({.member = &PolicyResult::policy_update, .id = "update", .name = "policy update"}, "Policy update")),
          .wide = true};
}

HtmlSection ablation_section(const Report& report) {
  if (report.ablation.empty()) return {};
  BarChart chart{.text = {.id = "ablation", .title = "Speedup by stages of the planner", .description = {}},
                 .axis = fmt::format("times as fast as {}", report.before),
                 .series = {{.name = "speedup", .css = "s2"}},
                 .bars = {},
                 .value_text = times_text,
                 .tick_text = tick_text,
                 .reference = 1.0,
                 .axis_end = {}};
  HtmlTable table{.caption = "stages of the planner",
                  .head = {"stages", "speedup", "ρ mean", "copies", "waits for copies"},
                  .rows = {}};
  for (const AblationRow& a : report.ablation) {
    chart.bars.push_back({.row = {.name = a.stages,
                                  .text = fmt::format("{} · ρ {}", times_text(a.speedup), ratio_text(a.rho_mean)),
                                  .strong = &a == &report.ablation.back()},
                          .values = {a.speedup}});
    chart.text.description += fmt::format("{}: {}. ", a.stages, times_text(a.speedup));
    table.rows.push_back({a.stages, times_text(a.speedup), ratio_text(a.rho_mean),
                          fmt::format("{:.2f}", a.copies_per_layer_event), seconds_text(a.exposed_copy_seconds)});
  }
  return {
      .id = "ablation",
      .heading = "What each stage of the planner adds",
      .body = figure(chart,
                     "Speedup and mean ρ with some stages alone. B: base placement, once per step; per micro-step L: "
                     "relocation of whole experts, P: replication, T: exact token assignment.") +
              folded(table)};
}

}  // namespace foremoe::report
