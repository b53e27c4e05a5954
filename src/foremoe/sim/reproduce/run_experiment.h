#pragma once

// An experiment carried out: every system on every input, each plan proved right before it is measured.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/evaluate/pair_figures.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/policy/policy.h"
#include "foremoe/sim/reproduce/experiment.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {

// What one system does on one input.
struct Measured {
  PlanFigures figures;
  PlanTimes times;  // of this machine
  PairFigures pairs;
  LoadStability stability;
  std::optional<SimulatedStep> step;  // where a column asks for it
  double model_layers_per_layer = 1;  // layers of the model for which each layer of the input stands
  double fetch_seconds = 0;           // modelled, one copy over the host's link
};

struct Cell {
  std::optional<Measured> measured;
  std::string skipped;             // why not; empty when measured
  std::vector<double> of_columns;  // [column]; NaN where there is none
};

struct ExperimentResult {
  Experiment experiment;
  std::vector<std::vector<Cell>> cells;  // [input][system]
};

struct AimResult {
  Aim aim;
  int figures = 0;   // that it speaks of
  double worst = 0;  // of them, the one closest to missing, or furthest from it
  bool met = false;  // false where there are none
};

// Told before each system is run on each input.
using OnCell = std::function<void(const ExperimentInput&, const ExperimentSystem&)>;

// Throws InputError, also when a plan is not one that check_plan accepts.
ExperimentResult run_experiment(const Experiment& experiment, ThreadPool& pool, const OnCell& on_cell = {});

std::vector<AimResult> judge(const ExperimentResult& result);

}  // namespace foremoe
