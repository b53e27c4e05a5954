#pragma once

// What fits a rank's memory: the residency to choose, and the largest micro-batch.

#include <cstddef>
#include <optional>
#include <span>

#include "foremoe/sim/simulation.h"

namespace foremoe {

// The most tokens that a rank's micro-step may have in the mean for the rank that holds most to stay within `budget`,
// the plan's imbalance kept: state and guests stay, activations grow with the tokens. 0 when state alone exceeds it.
Tokens largest_micro_batch(const SimulatedStep& step, Bytes budget, Tokens mean_tokens_per_rank);

// Where guests should live. Static guests need no copies inside the step, resident ones follow the load for as many
// slots in every layer, shared ones need the memory of a few layers and fetch at every use; which is best depends on
// model, cluster and load, so each is planned and simulated.
struct ResidencyTrial {
  double step_seconds = 0;
  Bytes memory;  // of the rank that holds most
};

struct ResidencyChoice {
  std::size_t trial = 0;  // the first of equals
  bool fits = true;       // the budget
};

// Of at least one trial: the quickest of those within the budget, and of two as quick the one that needs less memory.
// If none is within it, the one that needs least.
ResidencyChoice choose_residency(std::span<const ResidencyTrial> trials, std::optional<Bytes> budget);

}  // namespace foremoe
