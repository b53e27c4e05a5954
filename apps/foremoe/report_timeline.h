#pragma once

// A window of a simulated recompute: what some ranks did while one layer of one micro-step ran.

#include "foremoe/sim/report/report.h"
#include "report_runs.h"

namespace foremoe::cli {

struct WindowChoice {
  LayerId layer;
  MicroStepId micro_step;
  std::vector<RankId> ranks;  // shown, ascending
};

// Among the first layers and micro-steps the pair that the plan balances worst; of many ranks the most and the least
// loaded, and some between.
WindowChoice choose_window(const StepPlan& plan);

// Simulates the recompute up to the window anew.
report::TimelineWindow timeline_window(const ReportProblem& problem, const SimulatedPolicy& simulated,
                                       const Policy& policy, const WindowChoice& choice);

}  // namespace foremoe::cli
