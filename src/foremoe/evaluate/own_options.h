#pragma once

// Options that one policy alone has: FEPLB's number of dynamic experts, UltraEP's smallest replica, FineMoE's weights
// of LP 4.
//
//   PolicyWithOptions feplb = policy_with_options("feplb");
//   option_named(feplb.options, "dyn").set("2");
//   evaluate(*feplb.make(), input, …);

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

struct PolicyWithOptions {
  std::vector<Option> options;                          // none for most policies
  std::function<std::shared_ptr<const Policy>()> make;  // as the options were set
};

// Throws InputError, field `policy`, when there is no such policy.
PolicyWithOptions policy_with_options(const std::string& name);

}  // namespace foremoe
