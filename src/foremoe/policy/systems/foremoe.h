#pragma once

// Our planner as a policy, and its ablation with residency `static`, in which guests are chosen once per step and only
// quotas change inside it. Method, guarantees and sources are in planner/planner.h.

#include <memory>

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_foremoe();
std::unique_ptr<Policy> make_static();

}  // namespace foremoe
