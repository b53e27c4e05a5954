#pragma once

// Our planner as a policy, and its ablation whose guests are chosen once per step.

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_foremoe();
std::unique_ptr<Policy> make_static();  // residency static: only quotas change inside the step

}  // namespace foremoe
