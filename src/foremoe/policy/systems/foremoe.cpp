#include "foremoe/policy/systems/foremoe.h"

#include <optional>

namespace foremoe {

namespace {

class ForeMoe final : public Policy {
 public:
  ForeMoe(std::string_view name, std::string_view summary, std::optional<Residency> residency)
      : name_(name), summary_(summary), residency_(residency) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return true; }
  bool plans_as_asked() const override { return !residency_; }
  bool plans_layers_alone() const override { return true; }
  std::string why_cold(const PlannerOptions& options) const override {
    return options.guest_slots == 0 ? "there are no guest slots" : without_base_guests(with_residency(options));
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const PlanRequest request{.load = input.load,
                              .home = input.home,
                              .options = with_residency(input.options),
                              .previous = input.previous,
                              .on_micro_step = input.on_micro_step};
    PlannedStep step = plan_step(request, pool);
    step.plan.policy = name_;
    return step;
  }

 private:
  PlannerOptions with_residency(PlannerOptions options) const {
    if (residency_) options.residency = *residency_;
    return options;
  }

  std::string_view name_;
  std::string_view summary_;
  std::optional<Residency> residency_;  // empty: the input's residency
};

}  // namespace

std::unique_ptr<Policy> make_foremoe() {
  return std::make_unique<ForeMoe>("foremoe", "our planner: exact quotas, guests copied when the gain exceeds the cost",
                                   std::nullopt);
}

std::unique_ptr<Policy> make_static() {
  return std::make_unique<ForeMoe>(
      "static", "our planner, guests chosen once per step, exact quotas in every micro-step", Residency::kStatic);
}

}  // namespace foremoe
