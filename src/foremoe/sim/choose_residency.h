#pragma once

// Where guests should live: how long does the step take, and does it fit?
//
// Problem. Static guests need no copies inside the step, resident ones follow the load for as many slots in every
//   layer, shared ones need the memory of a few layers and fetch at every use; what pays depends on model, cluster
//   and load.
// Method. Each is planned and simulated; of those whose fullest rank stays within the budget the quickest is taken, the
//   one that needs least memory where two are as quick. Where none stays within it, the one that needs least memory.

#include <cstddef>
#include <optional>
#include <span>

#include "foremoe/core/units.h"

namespace foremoe {

struct ResidencyTrial {
  double step_seconds = 0;
  Bytes memory;  // of the rank that holds most
};

struct ResidencyChoice {
  std::size_t trial = 0;  // the first of equals
  bool fits = true;       // the budget
};

// At least one trial.
ResidencyChoice choose_residency(std::span<const ResidencyTrial> trials, std::optional<Bytes> budget);

}  // namespace foremoe
