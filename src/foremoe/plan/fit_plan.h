#pragma once

// Adapts a plan to another load, for executing other routes than those that were recorded.
//
// Slots do not change. Each guest keeps its quota, reduced in proportion (rounded down) if the load has fewer rows of
// its expert. Homes serve the rest. Complexity: O(events · layers · (ranks · slots + experts)).

#include <cstdint>

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct FittedPlan {
  StepPlan plan;                // with the digest of the load
  std::int64_t mismatched = 0;  // rows above the planned rows of their expert, summed over micro-steps and layers
};

// Throws InputError, field `plan`, if the load has another size, or if experts have no homes (residency `free`).
FittedPlan fit_plan(StepPlan plan, const LoadTable& load);

}  // namespace foremoe
