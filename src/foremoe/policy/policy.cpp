#include "foremoe/policy/policy.h"

#include "foremoe/policy/eplb.h"
#include "foremoe/policy/finemoe.h"
#include "foremoe/policy/foremoe_policies.h"
#include "foremoe/policy/vanilla.h"

namespace foremoe {

const std::vector<std::unique_ptr<Policy>>& all_policies() {
  static const auto policies = [] {
    std::vector<std::unique_ptr<Policy>> list;
    list.push_back(make_vanilla());
    list.push_back(make_eplb());
    list.push_back(make_eplb_exact());
    list.push_back(make_eplb_oracle());
    list.push_back(make_eplb_oracle_exact());
    list.push_back(make_static());
    list.push_back(make_finemoe_random());
    list.push_back(make_finemoe_symmetric());
    list.push_back(make_finemoe());
    list.push_back(make_foremoe());
    return list;
  }();
  return policies;
}

const Policy* find_policy(std::string_view name) {
  for (const auto& policy : all_policies()) {
    if (policy->name() == name) return policy.get();
  }
  return nullptr;
}

}  // namespace foremoe
