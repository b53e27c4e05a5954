#pragma once

// Gathers what `report` shows. Plans of all but two policies are let go as soon as their figures are known.

#include <string>
#include <string_view>
#include <vector>

#include "foremoe/sim/report/report.h"
#include "report_runs.h"

namespace foremoe::cli {

inline constexpr std::string_view kReportBaseline = "vanilla";  // that everything is compared with

class ReportGatherer {
 public:
  // Simulates the baseline. Throws InputError when that cannot be done. Keeps the reference.
  ReportGatherer(const ReportProblem& problem, const PlannerOptions& options);

  // Policies side by side, with `before` and `after`: foremoe or, where that is not among them, the fastest.
  void compare(const std::vector<const Policy*>& policies, report::Report& out);

  // Loads, traffic and timelines of these two.
  void look_closer(report::Report& out);

  // foremoe with some of its phases.
  void ablate(report::Report& out);

  // foremoe with other numbers of guest slots, in other residencies.
  void weigh_memory(const std::vector<int>& guest_slots, report::Report& out);

  // Plans that check_plan did not accept, in words; none of their figures are shown.
  const std::vector<std::string>& wrong() const { return wrong_; }

 private:
  SimulationResult checked(const Policy& policy, const PlannerOptions& options);
  report::PolicyResult figures(const Policy& policy, const PlannerOptions& options);
  SimulatedPolicy simulated(const Policy& policy);  // that has a plan

  const ReportProblem& problem_;
  PlannerOptions options_;
  std::vector<std::string> wrong_;
  const Policy& baseline_policy_;
  SimulatedPolicy baseline_;
};

}  // namespace foremoe::cli
