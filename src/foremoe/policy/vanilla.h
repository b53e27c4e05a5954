#pragma once

// Expert parallelism as it is without balancing: every expert is served at its home.

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_vanilla();

}  // namespace foremoe
