#include "foremoe/plan/check_plan.h"

#include <nlohmann/json.hpp>
#include <numeric>

#include "foremoe/plan/check_rules.h"

namespace foremoe {

static constexpr std::array<std::string_view, kNumViolationKinds> kKindNames = {"shape",
                                                                                "events",
                                                                                "digest",
                                                                                "options",
                                                                                "homes",
                                                                                "home-moves",
                                                                                "unknown-expert",
                                                                                "home-slots",
                                                                                "duplicate",
                                                                                "no-replica",
                                                                                "moved-slot",
                                                                                "changed-guest",
                                                                                "forward-only",
                                                                                "quota",
                                                                                "passes",
                                                                                "copies-per-rank",
                                                                                "copies-per-source",
                                                                                "tokens-per-guest",
                                                                                "max-load",
                                                                                "lower-bound",
                                                                                "routes",
                                                                                "figure"};

std::string_view to_string(ViolationKind kind) { return kKindNames[static_cast<std::size_t>(kind)]; }

std::int64_t CheckReport::num_violations() const {
  return std::accumulate(num_of_kind.begin(), num_of_kind.end(), std::int64_t{0});
}

void check::Findings::add(Violation violation) {
  ++report_.num_of_kind[static_cast<std::size_t>(violation.kind)];
  if (static_cast<int>(report_.violations.size()) < max_listed_) report_.violations.push_back(std::move(violation));
}

CheckReport check_plan(const StepPlan& plan, const LoadTable& load, const CheckOptions& given) {
  using enum ViolationKind;
  CheckReport report;
  CheckOptions options = given;
  const check::Subject subject{plan, load, options};
  check::Findings findings(report, options.max_listed);

  check::shapes(subject, findings);
  if (findings.has(kShape)) return report;
  check::digest(subject, findings);

  check::expert_ids(subject, findings);
  check::homes(subject, findings);
  check::event_order(subject, findings);
  if (findings.has(kUnknownExpert) || findings.has(kHomes) || findings.has(kEvents)) {
    findings.not_checked("slots, quotas, budgets, routes and figures: ids, homes or events are wrong");
    return report;
  }

  check::home_slots(subject, findings);
  check::replicas(subject, findings);
  check::staying_experts(subject, findings);
  check::static_guests(subject, findings);
  check::forward_only(subject, findings);
  check::quotas(subject, findings);
  check::passes(subject, findings);
  check::budgets(subject, findings);
  if (findings.has(kQuota) || findings.has(kDuplicate) || findings.has(kPasses)) {
    findings.not_checked("bounds, routes and figures: quotas or replicas are wrong");
    return report;
  }

  if (options.trace && !check::trace_has_the_load(subject)) {
    findings.not_checked("rows of tokens: the trace, so batched, does not have the rows that the load counts");
    options.trace = nullptr;
  }
  check::bounds(subject, findings);
  check::routes(subject, findings);
  report.figures = check::recompute_figures(subject);
  if (options.reported) check::reported_figures(*options.reported, *report.figures, findings);
  return report;
}

nlohmann::ordered_json to_json(const Violation& violation) {
  nlohmann::ordered_json json{{"kind", to_string(violation.kind)}};
  if (violation.event) json["event"] = violation.event->value;
  if (violation.layer) json["layer"] = violation.layer->value;
  if (violation.rank) json["rank"] = violation.rank->value;
  if (violation.slot) json["slot"] = violation.slot->value;
  if (violation.expert) json["expert"] = violation.expert->value;
  json["message"] = violation.message;
  return json;
}

nlohmann::ordered_json to_json(const CheckReport& report) {
  nlohmann::ordered_json violations = nlohmann::ordered_json::array();
  for (const Violation& v : report.violations) violations.push_back(to_json(v));
  nlohmann::ordered_json json{{"ok", report.ok()},
                              {"violations", std::move(violations)},
                              {"num_violations", report.num_violations()},
                              {"not_checked", report.not_checked}};
  if (report.figures) json["figures"] = to_json(*report.figures);
  return json;
}

}  // namespace foremoe
