#pragma once

// A plan before anything is in its slots, as every planner begins one.

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

// `header` has policy, residency, guest slots (≥ 0), micro-steps in flight (≥ 1) and options; the rest is made for the
// load, of whose ranks R and experts E: E/R and the guest slots on each rank, all empty, without tokens; events in the
// execution order; largest loads and bounds 0; all homes rank 0, for the caller to fill. Where R does not divide E the
// home slots are rounded down. Throws nothing.
StepPlan empty_plan(StepPlan header, const LoadTable& load);

}  // namespace foremoe
