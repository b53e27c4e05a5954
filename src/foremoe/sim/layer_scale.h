#pragma once

// A plan of fewer layers than the model stands for all of them: what each of its layers takes counts for as many of
// the model's.

#include <algorithm>
#include <cmath>

#include "foremoe/core/units.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {

// Layers of the model for each of the plan.
inline double layer_scale(const SimulationInput& input) {
  return static_cast<double>(input.cost.model().moe_layers) / std::max(1, input.plan.num_layers());
}

// To the nearest byte, halves away from 0.
inline Bytes scaled(Bytes bytes, double by) { return Bytes{std::llround(static_cast<double>(bytes.value) * by)}; }

}  // namespace foremoe
