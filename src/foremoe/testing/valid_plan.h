#pragma once

// A valid plan for tests to corrupt, and accessors for reports of check_plan.

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_json.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe::test {

inline std::string first_message(const CheckReport& report) {
  if (report.violations.empty()) return "no violation";
  return to_json(report.violations.front()).dump();
}

inline std::int64_t count(const CheckReport& report, ViolationKind kind) {
  return report.num_of_kind[static_cast<std::size_t>(kind)];
}

// A load in which every expert has tokens from every source, and a plan with a guest on every rank at every event.
struct ValidPlan {
  LoadTable load;
  StepPlan plan;

  ValidPlan(Residency residency, int in_flight) : load(random_load({.micro_steps = 4}, 11)) {
    for (Tokens& tokens : load.load.flat()) tokens += Tokens{20};
    for (std::uint64_t seed = 1; plan.slot_expert.empty() || !has_all_guests(); ++seed) {
      plan = random_plan(load, {residency, 1, in_flight}, seed);
    }
  }
  bool has_all_guests() const {
    for (int t = 0; t < plan.num_events(); ++t) {
      for (int l = 0; l < plan.num_layers(); ++l) {
        for (int r = 0; r < plan.num_ranks(); ++r) {
          if (plan.slot_expert(t, l, r, guest_slot()) == kNoExpert) return false;
          if (plan.slot_tokens(t, l, r, guest_slot()) == Tokens{0} && plan.in_flight == 1) return false;
        }
      }
    }
    return true;
  }
  // Adds `options` to the recorded options.
  void record(const nlohmann::json& options) {
    nlohmann::json all = nlohmann::json::parse(plan.options);
    all.update(options);
    plan.options = all.dump();
  }
  int guest_slot() const { return plan.num_slots() - 1; }
};

}  // namespace foremoe::test
