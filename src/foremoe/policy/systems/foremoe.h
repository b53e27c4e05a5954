#pragma once

// Our planner as a policy, and its ablation with residency `static`, which chooses guests once per step and then
// changes only quotas. See planner/planner.h for method, guarantees and sources.

#include <memory>

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_foremoe();
std::unique_ptr<Policy> make_static();

}  // namespace foremoe
