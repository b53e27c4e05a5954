#pragma once

// Options that one system alone has (FEPLB's number of dynamic experts, UltraEP's smallest replica, FineMoE's weights
// of LP 4, the review's ε), set on copies of the registered policies. Each is declared beside its system:
// Policy::options().
//
//   PolicyWithOptions feplb = policy_with_options(policy_named("feplb"));
//   option_named(feplb.options, "dyn").set("2");
//   evaluate(*feplb.policy, input, …);

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

struct PolicyWithOptions {
  std::shared_ptr<const Policy> policy;  // a copy where it has options of its own, else the registered one
  std::vector<Option> options;           // variables of `policy`; none for most
};

PolicyWithOptions policy_with_options(const Policy& policy);

// The option of that name of each policy that has it. Throws InputError that lists what they have when none has.
std::vector<Option> own_options_named(std::span<const PolicyWithOptions> policies, const std::string& name);

// Policies with their options set by texts "name=value", each for all of them that have it. Throws InputError for
// `policy_option`: an option that none of them has, or an invalid value.
std::vector<PolicyWithOptions> policies_with_options(const std::vector<const Policy*>& policies,
                                                     const std::vector<std::string>& assignments);

// Lines for a help text: policy, option, range, meaning, default.
std::string list_of_own_options();

}  // namespace foremoe
