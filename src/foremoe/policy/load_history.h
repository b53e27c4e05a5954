#pragma once

// What policies that plan from history look at: a former step's loads where they are given, and what has been seen of
// this step.

#include "foremoe/policy/policy.h"

namespace foremoe {

// The former step's load, or nullptr. Throws InputError naming it when it is of another model.
const LoadTable* former_load(const PolicyInput& input);

// Adds micro-steps first, …, first + count − 1 of [micro_step][expert], tokens: [expert].
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load, std::size_t first,
                                               std::size_t count);
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load);

}  // namespace foremoe
