#pragma once

// Options that one policy alone has, given by name as numbers: FEPLB's number of dynamic experts, UltraEP's smallest
// replica, FineMoE's weights of LP 4.

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "foremoe/policy/policy.h"

namespace foremoe {

using OwnOptions = std::vector<std::pair<std::string, double>>;

// Names of the options that only this policy has; empty for most.
std::span<const std::string_view> own_options(std::string_view policy);

// Throws InputError, field `policy` when there is no such policy, else the name of an option that it does not have.
std::shared_ptr<const Policy> policy_with(const std::string& name, const OwnOptions& own);

}  // namespace foremoe
