#pragma once

// The pictures of compare and simulate (modelled seconds of each policy by part), of fit (rows and memory of the
// busiest rank by micro-step) and of inspect (loads of experts). The Python package draws them.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/fit.h"
#include "foremoe/evaluate/layout_report.h"

namespace foremoe::cli {

// shows: contents of the picture, and needs: options that it requires, for --help.
Option plot_option(std::string& path, const std::string& shows = "modelled seconds of each policy by part",
                   const std::string& needs = "--cluster, ");

// Throws InputError, field `plot`, unless the path ends in .png or .svg, the file can be created and is not an
// input, and the Python package and matplotlib are installed. Does nothing without a path.
void expect_plot(const std::string& path, const std::vector<std::string>& inputs);

enum class Panels : std::uint8_t {
  kStep,    // one bar per policy: both phases, moves of homes, and placement that the rollout does not hide; mean ρ
  kPhases,  // recompute and policy update side by side; speedup of the step over vanilla
};

struct PlotRequest {
  std::string path;  // empty: none
  Panels panels = Panels::kStep;
  const std::vector<Workload>& groups;
  const CostModel& cost;
  const EvaluateOptions& options;
};

// Replaces this process by Python, which draws the plot and exits with `exit_code`, or with 2 and a message. Returns if
// there is no path, or if standard output cannot be written.
void draw_plot(const PlotRequest& request, std::span<const Evaluation> evaluations, int exit_code);

// Draws the rows and the memory of the busiest rank by micro-step, now and planned, with the limit. Ends as
// draw_plot().
void draw_fit(const PlotRequest& request, const Fit& fit, int exit_code);

// Draws the seconds of all layouts. Ends as draw_plot(), with exit code 0.
void draw_layout(const std::string& path, const LayoutChoice& choice, const Workload& whole, const CostModel& cost);

// Draws ExpertHeat: load of each expert ÷ mean of its layer. Ends as draw_plot(), with exit code 0.
void draw_heat(const std::string& path, const LoadTable& load);

}  // namespace foremoe::cli
