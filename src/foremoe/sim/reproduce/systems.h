#pragma once

// The policy that a system of an experiment means, with the options that it alone has.

#include <memory>
#include <span>
#include <string_view>

#include "foremoe/policy/policy.h"
#include "foremoe/sim/reproduce/experiment.h"

namespace foremoe {

// Keys of the options that only this policy has; empty for most.
std::span<const std::string_view> own_options(std::string_view policy);

// Throws InputError when there is no such policy.
std::shared_ptr<const Policy> policy_of(const ExperimentSystem& system);

}  // namespace foremoe
