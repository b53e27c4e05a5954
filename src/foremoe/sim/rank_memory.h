#pragma once

// What the rank that holds most holds at its fullest moment.
//
// Kept: from a micro-step's forward to its backward, per layer what the cost model says of tokens and rows; K
// micro-steps' worth with K in flight. Working: the rows of the layer that runs, of the micro-step that has most. A
// phase without backward keeps one layer's tokens. Guest slots count as far as the plan ever fills one: all layers' at
// once, but under `shared` those of `depth` turns, with gradients of one.

#include "foremoe/sim/phase_profile.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {

struct MemoryProblem {
  const SimulationInput& input;
  const SimulationOptions& options;
  const PhaseProfile& profile;
  double layer_scale = 1;  // layers of the model for each of the plan
  bool any_copies = false;
};

RankMemory rank_memory(const MemoryProblem& problem);

}  // namespace foremoe
