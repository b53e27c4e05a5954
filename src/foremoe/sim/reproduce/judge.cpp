#include <algorithm>
#include <cmath>
#include <limits>

#include "foremoe/sim/reproduce/run_experiment.h"

namespace foremoe {

namespace {

std::size_t index_of(const ExperimentResult& result, const std::string& system) {
  const auto& systems = result.experiment.systems;
  return static_cast<std::size_t>(std::ranges::find(systems, system, &ExperimentSystem::label) - systems.begin());
}

// How far inside its bounds a figure is; negative outside.
double room(const Aim& aim, double figure) {
  double least = std::numeric_limits<double>::infinity();
  if (aim.at_least) least = std::min(least, figure - *aim.at_least);
  if (aim.at_most) least = std::min(least, *aim.at_most - figure);
  return least;
}

AimResult judge(const ExperimentResult& result, const Aim& aim) {
  const Experiment& experiment = result.experiment;
  const auto column =
      static_cast<std::size_t>(std::ranges::find(experiment.columns, aim.column) - experiment.columns.begin());
  AimResult judged{.aim = aim};
  for (std::size_t i = 0; i < result.cells.size(); ++i) {
    if (!aim.input.empty() && experiment.inputs[i].label != aim.input) continue;
    for (std::size_t s = 0; s < result.cells[i].size(); ++s) {
      if (!aim.system.empty() && experiment.systems[s].label != aim.system) continue;
      double figure = result.cells[i][s].of_columns[column];
      if (!aim.relative_to.empty()) figure /= result.cells[i][index_of(result, aim.relative_to)].of_columns[column];
      if (std::isnan(figure)) continue;
      if (judged.figures++ == 0 || room(aim, figure) < room(aim, judged.worst)) judged.worst = figure;
    }
  }
  judged.met = judged.figures > 0 && room(aim, judged.worst) >= 0;
  return judged;
}

}  // namespace

std::vector<AimResult> judge(const ExperimentResult& result) {
  std::vector<AimResult> results;
  for (const Aim& aim : result.experiment.aims) results.push_back(judge(result, aim));
  return results;
}

}  // namespace foremoe
