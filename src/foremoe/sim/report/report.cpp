#include "foremoe/sim/report/report.h"

#include <fmt/format.h>

#include "foremoe/sim/report/box_chart.h"
#include "foremoe/sim/report/html_text.h"
#include "foremoe/sim/report/numbers.h"
#include "foremoe/sim/report/sections.h"

namespace foremoe::report {
namespace {

struct Comparison {
  const PolicyResult& before;
  const PolicyResult& after;
  double rho_before = 1;
  double rho_after = 1;
};

std::optional<Comparison> compare(const Report& report) {
  const PolicyResult* const before = report.find(report.before);
  const PolicyResult* const after = report.find(report.after);
  if (before == nullptr || after == nullptr) return std::nullopt;
  return Comparison{.before = *before,
                    .after = *after,
                    .rho_before = quantiles(before->rho).mean,
                    .rho_after = quantiles(after->rho).mean};
}

std::string counted(std::int64_t n, std::string_view noun) {
  return fmt::format("{} {}{}", counted_text(n), noun, n == 1 ? "" : "s");
}

const PolicyResult* best_other(const Report& report) {
  const PolicyResult* best = nullptr;
  for (const PolicyResult* p : planned(report)) {
    if (p->policy == report.before || p->policy == report.after) continue;
    if (best == nullptr || p->speedup > best->speedup) best = p;
  }
  return best;
}

// Where there is nothing to compare.
std::string summary_of_one(const Report& report, const PolicyResult& only) {
  const bool alone = report.policies.size() == 1;
  return fmt::format("On {} of {}, {} takes {} for a training step of {}, {} of what perfect balance would give.{}",
                     counted(report.num_ranks, "rank"), report.cluster, only.policy, seconds_text(only.step_seconds),
                     report.model, percent_text(only.ideal_step_seconds / only.step_seconds),
                     alone ? "" : fmt::format(" Nothing but {} could be planned: the table says why.", only.policy));
}

// The numbers that matter in two or three sentences.
std::string summary(const Report& report, const Comparison& c) {
  std::string text = fmt::format(
      "On {} of {}, {} takes {} for a training step of {} where {} takes {}: {} as fast, {} of what perfect balance "
      "without a single copy would give. ",
      counted(report.num_ranks, "rank"), report.cluster, c.after.policy, seconds_text(c.after.step_seconds),
      report.model, c.before.policy, seconds_text(c.before.step_seconds), times_text(c.after.speedup),
      percent_text(c.after.ideal_step_seconds / c.after.step_seconds));
  text += fmt::format("The busiest rank has {} times the mean load on average instead of {}. ", ratio_text(c.rho_after),
                      ratio_text(c.rho_before));
  const std::string waiting =
      c.after.exposed_copy_seconds > 0 ? seconds_text(c.after.exposed_copy_seconds) + " of" : std::string("no");
  text += fmt::format(
      "The price: {} per rank and layer, {} for guests on a rank, {:.1f} copies per layer and pass of a micro-step in "
      "the whole group, {} waiting for copies.",
      counted(report.guest_slots, "guest slot"), bytes_text(c.after.guest_bytes), c.after.copies_per_layer_event,
      waiting);
  if (const PolicyResult* const other = best_other(report)) {
    text += fmt::format(" The fastest of the others here, {}, is {} as fast as {}.", other->policy,
                        times_text(other->speedup), c.before.policy);
  }
  return text;
}

std::string tile(std::string_view value, std::string_view what, std::string_view detail) {
  return fmt::format("<div class=\"tile\"><dt>{}</dt><dd>{}<span>{}</span></dd></div>\n", escaped(what), escaped(value),
                     escaped(detail));
}

std::string tiles(const Comparison& c) {
  const PolicyResult& after = c.after;
  std::string out = "<dl class=\"tiles\">\n";
  out += tile(times_text(after.speedup), "Speedup of a step",
              fmt::format("{} instead of {}", seconds_text(after.step_seconds), seconds_text(c.before.step_seconds)));
  if (after.rl_speedup) out += tile(times_text(*after.rl_speedup), "Speedup of an RL step", "with the rollout");
  out += tile(percent_text(after.ideal_step_seconds / after.step_seconds), "Of the ideal",
              fmt::format("{} at perfect balance", seconds_text(after.ideal_step_seconds)));
  out += tile(ratio_text(c.rho_after), "Mean imbalance ρ", fmt::format("instead of {}", ratio_text(c.rho_before)));
  out += tile(seconds_text(after.exposed_copy_seconds), "Waiting for copies",
              fmt::format("of {} a step", seconds_text(after.step_seconds)));
  out +=
      tile(bytes_text(after.guest_bytes), "Memory for guests",
           fmt::format("fullest rank {}, was {}", bytes_text(after.memory_bytes), bytes_text(c.before.memory_bytes)));
  return out + "</dl>\n";
}

std::string header(const Report& report) {
  std::string out = fmt::format("<p class=\"over\">ForeMoE report</p>\n<h1>{}</h1>\n",
                                escaped(fmt::format("{} on {}", report.model, report.cluster)));
  out += paragraph(report.input, "input");
  if (const auto comparison = compare(report)) {
    if (comparison->before.rho.empty()) {
      out += paragraph("No load: no rank has a token in any layer, so there is nothing to balance.", "summary");
    } else if (report.before == report.after) {
      out += paragraph(summary_of_one(report, comparison->after), "summary");
    } else {
      out += paragraph(summary(report, *comparison), "summary") + tiles(*comparison);
    }
  }
  for (const std::string& remark : report.remarks) out += paragraph(remark, "note");
  return out;
}

std::string footer(const Report& report) {
  std::string out = "<h2>What was asked</h2>\n<dl class=\"settings\">\n";
  for (const Setting& s : report.settings) {
    out += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(s.name), escaped(s.value));
  }
  out += "</dl>\n";
  out += paragraph(
      "Plans are real and proved right; times, memory and traffic are those of a model of the cluster, not measured on "
      "one. ρ is the busiest rank's tokens divided by the mean rank's: a layer's experts take ρ times as long as they "
      "could. A guest is a copy of an expert away from its home.");
  return out;
}

}  // namespace

double PhaseTime::seconds() const {
  double sum = 0;
  for (const TimePart& part : parts) sum += part.seconds;
  return sum;
}

const PolicyResult* Report::find(const std::string& policy) const {
  for (const PolicyResult& p : policies) {
    if (p.policy == policy && p.skipped.empty()) return &p;
  }
  return nullptr;
}

std::vector<const PolicyResult*> planned(const Report& report) {
  std::vector<const PolicyResult*> out;
  for (const PolicyResult& p : report.policies) {
    if (p.skipped.empty()) out.push_back(&p);
  }
  return out;
}

std::string side_by_side(std::string_view first, std::string_view second) {
  return fmt::format("<div class=\"pair\">\n{}{}</div>\n", first, second);
}

std::string to_html(const Report& report) {
  HtmlDocument document{.title = fmt::format("{} on {}: ForeMoE report", report.model, report.cluster),
                        .header = header(report),
                        .sections = {},
                        .footer = footer(report)};
  for (const auto make : {policies_section, load_section, balance_section, shares_section, time_section,
                          ablation_section, memory_section, traffic_section, timeline_section}) {
    HtmlSection section = make(report);
    if (!section.body.empty()) document.sections.push_back(std::move(section));
  }
  return to_html(document);
}

}  // namespace foremoe::report
