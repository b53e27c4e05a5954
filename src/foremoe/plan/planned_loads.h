#pragma once

// What a plan gives each rank to compute.

#include <optional>
#include <span>

#include "foremoe/core/array.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/step_plan.h"

namespace foremoe {

// [micro_step][layer][rank], tokens: the sum of the quotas of the rank's slots. A micro-step counts once, whether its
// passes are one event or two, as both have the same quotas in a plan that check_plan accepts. Throws nothing.
Array<Tokens, 3> planned_loads(const StepPlan& plan);

// ρ of one micro-step and layer: largest ÷ mean of `rank_loads`, [rank]; none without load. Throws nothing.
std::optional<double> imbalance(std::span<const Tokens> rank_loads);

}  // namespace foremoe
