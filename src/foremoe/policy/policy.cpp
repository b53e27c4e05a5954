#include "foremoe/policy/policy.h"

#include <fmt/format.h>

#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"
#include "foremoe/policy/systems/echo.h"
#include "foremoe/policy/systems/ema.h"
#include "foremoe/policy/systems/eplb.h"
#include "foremoe/policy/systems/fastermoe.h"
#include "foremoe/policy/systems/feplb.h"
#include "foremoe/policy/systems/finemoe.h"
#include "foremoe/policy/systems/flexmoe.h"
#include "foremoe/policy/systems/foremoe.h"
#include "foremoe/policy/systems/foremoe_review.h"
#include "foremoe/policy/systems/laer.h"
#include "foremoe/policy/systems/llep.h"
#include "foremoe/policy/systems/lplb.h"
#include "foremoe/policy/systems/moonep.h"
#include "foremoe/policy/systems/relibra.h"
#include "foremoe/policy/systems/smartmoe.h"
#include "foremoe/policy/systems/symi.h"
#include "foremoe/policy/systems/ultraep.h"
#include "foremoe/policy/systems/vanilla.h"

namespace foremoe {

namespace {

using Policies = std::vector<std::unique_ptr<Policy>>;

Policies make_systems() {
  Policies list;
  list.push_back(make_vanilla());
  list.push_back(make_static());
  list.push_back(make_eplb());
  list.push_back(make_eplb_ema());
  list.push_back(make_ema());
  list.push_back(make_eplb_oracle());
  list.push_back(make_finemoe_random());
  list.push_back(make_finemoe_symmetric());
  list.push_back(make_finemoe());
  list.push_back(make_feplb());
  list.push_back(make_foremoe_review());
  list.push_back(make_ultraep());
  list.push_back(make_relibra());
  list.push_back(make_fastermoe());
  list.push_back(make_flexmoe());
  list.push_back(make_lplb());
  list.push_back(make_laer());
  list.push_back(make_smartmoe());
  list.push_back(make_symi());
  list.push_back(make_llep());
  list.push_back(make_moonep());
  list.push_back(make_echo());
  list.push_back(make_foremoe());
  return list;
}

Policies make_variants() {
  Policies list;
  list.push_back(make_eplb_exact());
  list.push_back(make_eplb_oracle_exact());
  list.push_back(make_feplb({.try_smaller = true}));
  list.push_back(make_foremoe_review({.adjust = false}));
  list.push_back(make_foremoe_review({.base = false}));
  list.push_back(make_laer_oracle());
  return list;
}

}  // namespace

// Never destroyed: at the end of a process, daemon threads of Python may still plan.
const Policies& all_systems() {
  static const auto& systems = *new Policies(make_systems());
  return systems;
}

const Policies& all_variants() {
  static const auto& variants = *new Policies(make_variants());
  return variants;
}

std::vector<const Policy*> all_policies() {
  std::vector<const Policy*> policies;
  for (const Policies* list : {&all_systems(), &all_variants()}) {
    for (const auto& policy : *list) policies.push_back(policy.get());
  }
  return policies;
}

const Policy* find_policy(std::string_view name) {
  for (const Policy* policy : all_policies()) {
    if (policy->name() == name) return policy;
  }
  return nullptr;
}

std::string Policy::why_cold(const PlannerOptions& /*options*/) const {
  return fmt::format("policy {} does not start from one", name());
}

const Policy& policy_named(const std::string& name) {
  const Policy* const policy = find_policy(name);
  if (policy != nullptr) return *policy;
  std::vector<std::string> names;
  for (const Policy* p : all_policies()) names.emplace_back(p->name());
  throw InputError({.field = "policy"},
                   fmt::format("'{}', expected one of {}{}", name, fmt::join(names, ", "), did_you_mean(name, names)));
}

std::vector<const Policy*> policies_named(const std::vector<std::string>& names) {
  std::vector<const Policy*> policies;
  if (names.empty()) throw InputError({.field = "policy"}, "must name at least one policy");
  for (const std::string& name : names) {
    if (name == "all") {
      for (const auto& policy : all_systems()) policies.push_back(policy.get());
    } else {
      policies.push_back(&policy_named(name));
    }
  }
  return policies;
}

}  // namespace foremoe
