#include "foremoe/policy/policy.h"

#include "foremoe/policy/echo.h"
#include "foremoe/policy/eplb.h"
#include "foremoe/policy/fastermoe.h"
#include "foremoe/policy/feplb.h"
#include "foremoe/policy/finemoe.h"
#include "foremoe/policy/flexmoe.h"
#include "foremoe/policy/foremoe_policies.h"
#include "foremoe/policy/foremoe_review.h"
#include "foremoe/policy/laer.h"
#include "foremoe/policy/llep.h"
#include "foremoe/policy/lplb.h"
#include "foremoe/policy/moonep.h"
#include "foremoe/policy/relibra.h"
#include "foremoe/policy/smartmoe.h"
#include "foremoe/policy/symi.h"
#include "foremoe/policy/ultraep.h"
#include "foremoe/policy/vanilla.h"

namespace foremoe {

namespace {

using Policies = std::vector<std::unique_ptr<Policy>>;

Policies make_systems() {
  Policies list;
  list.push_back(make_vanilla());
  list.push_back(make_static());
  list.push_back(make_eplb());
  list.push_back(make_eplb_ema());
  list.push_back(make_eplb_oracle());
  list.push_back(make_finemoe_random());
  list.push_back(make_finemoe_symmetric());
  list.push_back(make_finemoe());
  list.push_back(make_feplb());
  list.push_back(make_foremoe_review());
  list.push_back(make_ultraep({.min_tokens_per_replica = 1}));
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
  list.push_back(make_ultraep());
  list.push_back(make_laer_oracle());
  return list;
}

}  // namespace

const Policies& all_systems() {
  static const Policies systems = make_systems();
  return systems;
}

const Policies& all_variants() {
  static const Policies variants = make_variants();
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

}  // namespace foremoe
