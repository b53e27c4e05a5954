#pragma once

// Chooses the residency and the largest micro-batch that fit into a rank's memory.

#include <cstddef>
#include <optional>
#include <span>

#include "foremoe/sim/simulation.h"

namespace foremoe {

// Largest mean tokens per rank and micro-step for which the rank with the most memory stays within `budget`. Assumes
// that the plan's imbalance does not change. State and guests are constant; activations grow with the number of tokens.
// 0 if the state alone exceeds the budget.
Tokens largest_micro_batch(const SimulatedStep& step, Bytes budget, Tokens mean_tokens_per_rank);

// One residency, planned and simulated. Static guests need no copies inside the step. Resident guests follow the load
// and need their slots in every layer. Shared guests need memory for a few layers and are fetched at every use. The
// best one depends on model, cluster and load.
struct ResidencyTrial {
  double step_seconds = 0;
  Bytes memory;  // of the rank with the most
};

struct ResidencyChoice {
  std::size_t trial = 0;  // the first of equal ones
  bool fits = true;       // within the budget
};

// Returns the fastest trial within the budget. Ties go to the trial that needs less memory. If no trial is within the
// budget, returns the one that needs the least memory. Requires at least one trial.
ResidencyChoice choose_residency(std::span<const ResidencyTrial> trials, std::optional<Bytes> budget);

}  // namespace foremoe
