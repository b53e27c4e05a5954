#pragma once

// Expert parallelism without balancing: every expert is served at its home.

#include <memory>

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_vanilla();

}  // namespace foremoe
