#pragma once

// The largest micro-batch that fits into a rank's memory.

#include "foremoe/sim/simulation.h"

namespace foremoe {

// Largest mean tokens per rank and micro-step for which the rank with the most memory stays within `budget`. Assumes
// that the plan's imbalance does not change. State and guests are constant; activations grow with the number of tokens.
// 0 if the state alone exceeds the budget.
Tokens largest_micro_batch(const SimulatedStep& step, Bytes budget, Tokens mean_tokens_per_rank);

}  // namespace foremoe
