#pragma once

// Adapts a plan to another load, to execute routes that differ from the recorded ones.
//
// Slots do not change. If the load has fewer rows of an expert than planned, its guests' quotas shrink in proportion
// (rounded down). Homes serve the rest. Complexity: O(events · layers · (ranks · slots + experts)).

#include <cstdint>

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct FittedPlan {
  StepPlan plan;                // with the digest of the load
  std::int64_t mismatched = 0;  // rows above the planned rows of their expert, summed over micro-steps and layers
};

// Throws InputError, field `plan`, if the load has a different shape, or if homes are not pinned (residency `free`).
FittedPlan fit_plan(StepPlan plan, const LoadTable& load);

}  // namespace foremoe
