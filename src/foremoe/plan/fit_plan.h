#pragma once

// A plan for a load that it was not made for: routes were recorded, and others are executed.
//
// Slots stay. Each guest keeps its quota, or where the load has fewer rows of its expert the same part of it, rounded
// down. The expert's home serves the rest. Complexity: O(events · layers · (ranks · slots + experts)).

#include <cstdint>

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct FittedPlan {
  StepPlan plan;                // its digest is that of the load
  std::int64_t mismatched = 0;  // rows beyond those that the plan had of their expert, over micro-steps and layers
};

// Throws InputError, field `plan`, for a load of another size, and where experts have no homes (residency `free`).
FittedPlan fit_plan(StepPlan plan, const LoadTable& load);

}  // namespace foremoe
