#pragma once

// What policies that plan from history look at: a former step's loads and plan where they are given, and what has been
// seen of this step.

#include <string_view>

#include "foremoe/policy/policy.h"

namespace foremoe {

// The former step's load, or nullptr. Throws InputError naming it when it is of another model.
const LoadTable* former_load(const PolicyInput& input);

// The former step's plan where `policy` made it for as many layers, ranks, experts and guest slots; nullptr otherwise.
const StepPlan* former_plan(const PolicyInput& input, std::string_view policy);

// What the plan ends with: [rank][slot]. It has an event, as former_plan() makes sure.
Array<ExpertId, 2> last_placement(const StepPlan& plan, LayerId layer);

// Adds micro-steps first, …, first + count − 1 of [micro_step][expert], tokens: [expert].
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load, std::size_t first,
                                               std::size_t count);
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load);

}  // namespace foremoe
