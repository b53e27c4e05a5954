#include "foremoe/policy/systems/vanilla.h"

namespace foremoe {

namespace {

class Vanilla final : public Policy {
 public:
  std::string_view name() const override { return "vanilla"; }
  std::string_view summary() const override { return "no balancing: every expert is served at its home"; }
  bool plans_layers_alone() const override { return true; }
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
};

}  // namespace

std::unique_ptr<Policy> make_vanilla() { return std::make_unique<Vanilla>(); }

}  // namespace foremoe
