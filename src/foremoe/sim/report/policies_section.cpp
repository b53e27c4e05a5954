// The table of policies.

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "foremoe/sim/report/box_chart.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

bool has_rollout(const Report& report) {
  return std::ranges::any_of(planned(report), [](const PolicyResult* p) { return p->rl_speedup.has_value(); });
}

bool has_budget(const Report& report) {
  return std::ranges::any_of(planned(report), [](const PolicyResult* p) { return p->largest_micro_batch.has_value(); });
}

}  // namespace

HtmlSection policies_section(const Report& report) {
  const bool rollout = has_rollout(report);
  const bool budget = has_budget(report);
  HtmlTable table{.caption = fmt::format("Policies, {} guest slot{} per rank and layer", report.guest_slots,
                                         report.guest_slots == 1 ? "" : "s"),
                  .head = {"policy", "speedup", "step", "of ideal", "ρ mean", "ρ 99 %", "ρ most", "waits for copies",
                           "copies", "memory", "guests", "peak tokens", "home moves", "planning"},
                  .rows = {},
                  .strong_row = -1};
  if (rollout) table.head.insert(table.head.begin() + 2, "RL step");
  if (budget) table.head.emplace_back("largest micro-batch");
  for (const PolicyResult& p : report.policies) {
    if (!p.skipped.empty()) {
      table.rows.push_back({p.policy, "skipped: " + p.skipped});
      continue;
    }
    if (p.policy == report.after) table.strong_row = static_cast<int>(table.rows.size());
    const Quantiles rho = quantiles(p.rho);
    const auto ratio = [&](double value) { return p.rho.empty() ? std::string("–") : ratio_text(value); };  // no load
    std::vector<std::string> row{p.policy,
                                 times_text(p.speedup),
                                 seconds_text(p.step_seconds),
                                 percent_text(p.ideal_step_seconds / p.step_seconds),
                                 ratio(rho.mean),
                                 ratio(rho.p99),
                                 ratio(rho.most),
                                 seconds_text(p.exposed_copy_seconds),
                                 fmt::format("{:.2f}", p.copies_per_layer_event),
                                 bytes_text(p.memory_bytes),
                                 bytes_text(p.guest_bytes),
                                 counted_text(p.peak_tokens),
                                 counted_text(p.home_moves),
                                 fmt::format("{:.1f} µs", p.plan_us)};
    if (rollout) row.insert(row.begin() + 2, p.rl_speedup ? times_text(*p.rl_speedup) : "–");
    if (budget) row.push_back(p.largest_micro_batch ? counted_text(*p.largest_micro_batch) : "–");
    table.rows.push_back(std::move(row));
  }
  std::string body = to_html(table);
  body += paragraph(
      "Copies: per layer and pass of a micro-step, whole group. Memory: of the fullest rank, of which guests. Peak and "
      "largest micro-batch: in tokens. Planning: CPU time of one layer of one micro-step.",
      "note");
  return {.id = "policies", .heading = "Policies side by side", .body = std::move(body), .wide = true};
}

}  // namespace foremoe::report
