#pragma once

// Options of a single system: FEPLB's number of dynamic experts, UltraEP's smallest replica, FineMoE's weights of LP 4,
// the review's ε. They are set on copies of the registered policies. Each system declares its options in
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
  std::shared_ptr<const Policy> policy;  // a copy if the policy has own options, else the registered object
  std::vector<Option> options;           // bound to variables of `policy`; empty for most
};

PolicyWithOptions policy_with_options(const Policy& policy);

// Returns the option `name` of each policy that has it. Throws InputError, listing the policies' options, if none does.
std::vector<Option> own_options_named(std::span<const PolicyWithOptions> policies, const std::string& name);

// Returns policies with options set from "name=value" texts, each applied to every policy that has the option. Throws
// InputError (field `policy_option`) for a malformed text, an option that no policy has, or an invalid value.
std::vector<PolicyWithOptions> policies_with_options(const std::vector<const Policy*>& policies,
                                                     const std::vector<std::string>& assignments);

// Help text, one line per option: policy, option, range, meaning, default.
std::string list_of_own_options();

}  // namespace foremoe
