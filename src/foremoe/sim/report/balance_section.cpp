// How imbalance is distributed over layers and micro-steps, by policy.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "foremoe/rollout/load_statistics.h"
#include "foremoe/sim/report/bar_chart.h"
#include "foremoe/sim/report/box_chart.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

constexpr std::array<std::string_view, kNumRhoBuckets> kBucketNames{"below 1.1", "1.1 to 1.3", "1.3 to 1.5", "1.5 to 2",
                                                                    "2 and more"};

std::array<double, kNumRhoBuckets> shares(const PolicyResult& p) {
  std::array<double, kNumRhoBuckets> counts{};
  for (const double rho : p.rho) counts.at(rho_bucket(rho)) += 1;
  for (double& count : counts) count /= static_cast<double>(p.rho.size());
  return counts;
}

bool has_rho(const Report& report) {
  return std::ranges::any_of(planned(report), [](const PolicyResult* p) { return !p->rho.empty(); });
}

}  // namespace

HtmlSection balance_section(const Report& report) {
  if (!has_rho(report)) return {};
  BoxChart chart{.text = {.id = "rho", .title = "Imbalance ρ by policy", .description = {}},
                 .axis = "ρ (1 is perfect; logarithmic axis)",
                 .rows = {},
                 .value_text = ratio_text};
  HtmlTable table{.caption = "imbalance ρ over all layers and micro-steps",
                  .head = {"policy", "least", "25 %", "median", "75 %", "99 %", "most", "mean"},
                  .rows = {}};
  for (const PolicyResult* p : planned(report)) {
    if (p->rho.empty()) continue;
    const Quantiles q = quantiles(p->rho);
    chart.rows.push_back(
        {.row = {.name = p->policy, .text = ratio_text(q.mean), .strong = p->policy == report.after}, .values = q});
    chart.text.description += fmt::format("{}: mean {}, most {}. ", p->policy, ratio_text(q.mean), ratio_text(q.most));
    table.rows.push_back({p->policy, ratio_text(q.least), ratio_text(q.p25), ratio_text(q.median), ratio_text(q.p75),
                          ratio_text(q.p99), ratio_text(q.most), ratio_text(q.mean)});
  }
  return {
      .id = "balance",
      .heading = "Imbalance, by policy",
      .body =
          figure(chart,
                 "ρ: busiest rank ÷ mean rank. Line: from the least to the most of all layers and micro-steps; box: "
                 "the middle half; dot and number: the mean.") +
          folded(table)};
}

HtmlSection shares_section(const Report& report) {
  if (!has_rho(report)) return {};
  BarChart chart{.text = {.id = "shares", .title = "Share of micro-steps by imbalance", .description = {}},
                 .axis = "share of all layers and micro-steps, %",
                 .series = {},
                 .bars = {},
                 .value_text = percent_text,
                 .tick_text = [](double v) { return fmt::format("{:.0f}", 100 * v); },
                 .reference = {},
                 .axis_end = 1.0};
  HtmlTable table{.caption = "share of layers and micro-steps by ρ", .head = {"policy"}, .rows = {}};
  for (std::size_t i = 0; i < kBucketNames.size(); ++i) {
    chart.series.push_back(
        {.name = fmt::format("{}{}", i == 0 ? "ρ " : "", kBucketNames.at(i)), .css = fmt::format("q{}", i)});
    table.head.emplace_back(kBucketNames.at(i));
  }
  for (const PolicyResult* p : planned(report)) {
    if (p->rho.empty()) continue;
    const auto parts = shares(*p);
    chart.bars.push_back({.row = {.name = p->policy, .text = {}, .strong = p->policy == report.after},
                          .values = {parts.begin(), parts.end()}});
    chart.text.description += fmt::format("{}: {} below 1.1. ", p->policy, percent_text(parts.front()));
    std::vector<std::string> row{p->policy};
    for (const double part : parts) row.push_back(percent_text(part));
    table.rows.push_back(std::move(row));
  }
  return {.id = "shares",
          .heading = "How often is it unbalanced?",
          .body = figure(chart, "Every layer of every micro-step falls in one of five classes of ρ.") + folded(table)};
}

}  // namespace foremoe::report
