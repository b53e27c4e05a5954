#pragma once

// In every micro-step, the rank with the fewest tokens serves some of the most popular expert of the rank with the
// most: half of the difference, if the expert has as many. Residency `shared`. The example of
// docs/developers/first_change.md.

#include <memory>

#include "foremoe/policy/policy.h"

namespace foremoe {

std::unique_ptr<Policy> make_halve_gap();

}  // namespace foremoe
