#include "foremoe/policy/policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "foremoe/policy/echo.h"
#include "foremoe/policy/ema.h"
#include "foremoe/policy/eplb.h"
#include "foremoe/policy/fastermoe.h"
#include "foremoe/policy/feplb.h"
#include "foremoe/policy/finemoe.h"
#include "foremoe/policy/flexmoe.h"
#include "foremoe/policy/foremoe_review.h"
#include "foremoe/policy/laer.h"
#include "foremoe/policy/llep.h"
#include "foremoe/policy/lplb.h"
#include "foremoe/policy/moonep.h"
#include "foremoe/policy/relibra.h"
#include "foremoe/policy/smartmoe.h"
#include "foremoe/policy/symi.h"
#include "foremoe/policy/ultraep.h"

namespace foremoe {

namespace {

class ForeMoe final : public Policy {
 public:
  ForeMoe(std::string_view name, std::string_view summary, std::optional<Residency> residency)
      : name_(name), summary_(summary), residency_(residency) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  std::span<const std::string_view> uses() const override {
    return std::span(kUses).first(residency_ ? kUses.size() - 2 : kUses.size());
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return true; }
  std::string note_on_previous(const PolicyInput& input) const override {
    return input.previous == nullptr ? "" : foremoe::note_on_previous(*input.previous, options_of(input));
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const PlanRequest request{.load = input.load,
                              .home = input.home,
                              .options = options_of(input),
                              .previous = input.previous,
                              .on_micro_step = input.on_micro_step};
    PlannedStep step = plan_step(request, pool);
    step.plan.policy = name_;
    return step;
  }

 private:
  // The last two are of no consequence under residency static, which searches nothing anew.
  // clang-format off
  static constexpr std::array<std::string_view, 12> kUses{
      "guest_slots", "in_flight", "stages", "prefer", "tolerance", "rehome", "max_copies_per_rank",
      "max_copies_per_source", "min_tokens_per_guest", "previous", "residency", "seed"};
  // clang-format on

  PlannerOptions options_of(const PolicyInput& input) const {
    PlannerOptions options = input.options;
    if (residency_) options.residency = *residency_;
    return options;
  }

  std::string_view name_;
  std::string_view summary_;
  std::optional<Residency> residency_;  // none: as the options say
};

class Vanilla final : public Policy {
 public:
  std::string_view name() const override { return "vanilla"; }
  std::string_view summary() const override { return "no balancing: every expert is served at its home"; }
  std::span<const std::string_view> uses() const override { return kUses; }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    PlannerOptions options;
    options.guest_slots = 0;
    options.in_flight = input.options.in_flight;
    options.residency = Residency::kStatic;
    options.stages = {.base = false, .relocation = false, .replication = false, .tokens = false};
    PlannedStep step = plan_step({.load = input.load, .home = input.home, .options = options}, pool);
    step.plan.policy = name();
    return step;
  }

 private:
  static constexpr std::array<std::string_view, 1> kUses{"in_flight"};
};

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

std::unique_ptr<Policy> make_foremoe() {
  return std::make_unique<ForeMoe>("foremoe", "our planner: exact quotas, guests copied where and when they pay",
                                   std::nullopt);
}

std::unique_ptr<Policy> make_static() {
  return std::make_unique<ForeMoe>(
      "static", "our planner, guests chosen once per step, exact quotas in every micro-step", Residency::kStatic);
}

std::unique_ptr<Policy> make_vanilla() { return std::make_unique<Vanilla>(); }

std::string Policy::note_on_previous(const PolicyInput& input) const {
  if (input.previous == nullptr || std::ranges::count(uses(), "previous") > 0) return {};
  return fmt::format("the former plan has no effect: policy {} does not start from one", name());
}

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
