#pragma once

// Gathers what `report` shows. Plans of all but two policies are let go as soon as their figures are known.

#include <string>
#include <string_view>
#include <vector>

#include "foremoe/evaluate/evaluate.h"
#include "foremoe/sim/report/report.h"

namespace foremoe::cli {

inline constexpr std::string_view kReportBaseline = "vanilla";  // that everything is compared with

// What some ranks did while one layer of one micro-step ran.
struct WindowChoice {
  LayerId layer;
  MicroStepId micro_step;
  std::vector<RankId> ranks;  // shown, ascending
};

class ReportGatherer {
 public:
  // Evaluates the baseline. Throws InputError when that cannot be done. Keeps the reference.
  ReportGatherer(const StepInput& input, const EvaluateOptions& options, EvaluationContext context);

  // Policies side by side, with `before` and `after`: foremoe or, where that is not among them, the fastest.
  void compare(const std::vector<const Policy*>& policies, report::Report& out);

  // Loads, traffic and timelines of these two.
  void look_closer(report::Report& out);

  // foremoe with some of its stages.
  void ablate(report::Report& out);

  // foremoe with other numbers of guest slots, in other residencies.
  void weigh_memory(const std::vector<int>& guest_slots, report::Report& out);

  // Plans that check_plan did not accept, in words; none of their figures are shown.
  const std::vector<std::string>& wrong() const { return wrong_; }

 private:
  Evaluation checked(const Policy& policy, const PlannerOptions& planner);
  Evaluation planned(const Policy& policy);  // throws InputError when there is no plan
  report::PolicyResult figures(const Policy& policy, const PlannerOptions& planner);
  report::TimelineWindow timeline_window(const Evaluation& evaluation, const Policy& policy,
                                         const WindowChoice& choice) const;

  const StepInput& input_;
  const EvaluateOptions options_;
  const EvaluationContext context_;
  std::vector<std::string> wrong_;
  const Policy& baseline_policy_;
  Evaluation baseline_;
};

}  // namespace foremoe::cli
