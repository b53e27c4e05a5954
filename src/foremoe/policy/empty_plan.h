#pragma once

// A plan before anything is in its slots, as policies other than our planner begin one, and what they ask of an input.

#include <string_view>

#include "foremoe/policy/policy.h"

namespace foremoe {

// Throws InputError for options that make no sense and for homes of another shape than the load.
void check_policy_input(const PolicyInput& input);

// All slots empty, no tokens, loads and bounds 0; homes those of the input. R divides E. Recorded options are guest
// slots, residency and in-flight: what the policy takes no notice of is no promise of its plan.
StepPlan empty_plan(std::string_view policy, Residency residency, const PolicyInput& input);

}  // namespace foremoe
