#pragma once

// Options that one policy alone has: FEPLB's number of dynamic experts, UltraEP's smallest replica, FineMoE's weights
// of LP 4, the review's ε.
//
//   PolicyWithOptions feplb = policy_with_options("feplb");
//   option_named(feplb.options, "dyn").set("2");
//   evaluate(*feplb.make(), input, …);

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

struct PolicyWithOptions {
  std::string name = {};                                // of the policy
  std::vector<Option> options;                          // none for most policies
  std::function<std::shared_ptr<const Policy>()> make;  // as the options were set
};

// Throws InputError, field `policy`, when there is no such policy.
PolicyWithOptions policy_with_options(const std::string& name);

// The option of that name of each policy that has it. Throws InputError that lists what they have when none has.
std::vector<Option> own_options_named(std::span<const PolicyWithOptions> policies, const std::string& name);

// Policies with their options set by texts "name=value", each for all of them that have it. Throws InputError for an
// option that none of them has, and for a value that cannot be.
std::vector<PolicyWithOptions> policies_with_options(const std::vector<const Policy*>& policies,
                                                     const std::vector<std::string>& assignments);

// Lines for a help text: policy, option, range, meaning, default.
std::string list_of_own_options();

}  // namespace foremoe
