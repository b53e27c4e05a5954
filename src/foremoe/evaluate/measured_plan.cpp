#include "foremoe/evaluate/measured_plan.h"

#include <algorithm>
#include <ctime>
#include <utility>

namespace foremoe {
namespace {

// CPU time of a policy that does not hand out its micro-steps one by one: what it does once per step, and the first of
// its micro-steps. Where planning is charged between router and experts, a micro-step is not charged twice.
double seconds_of_first_micro_step(const Policy& policy, const PlannedStep& planned) {
  const OnlineWork online = policy.online();
  const bool plans_online = online.planning_seconds > 0 || online.planning_seconds_per_slot > 0;
  const double micro_steps = std::max(1, planned.plan.num_micro_steps());
  return planned.times.base_cpu_seconds + (plans_online ? 0 : planned.times.planning_cpu_seconds / micro_steps);
}

}  // namespace

std::optional<MeasuredPlan> plan_measured(const Policy& policy, const StepInput& input, const PlannerOptions& planner,
                                          const EvaluationContext& context, std::string& why_not) {
  double seconds = 0;
  bool streams = false;
  PolicyInput policy_input = input.for_policy(planner);
  const std::clock_t begin = std::clock();
  policy_input.on_micro_step = [&](const StepPlan& plan, MicroStepId m) {
    streams = true;
    // Under `shared` what is copied depends on quotas: all must be known before the first turn.
    if (m > MicroStepId{0} && plan.residency != Residency::kShared) return;
    seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  PolicyResult result = input.plan(policy, policy_input, context.pool);
  if (auto* const skipped = std::get_if<Skipped>(&result)) {
    why_not = std::move(skipped->reason);
    return std::nullopt;
  }
  MeasuredPlan measured{.step = std::move(std::get<PlannedStep>(result))};
  if (!policy.plans_ahead(policy_input)) return measured;
  if (!streams) seconds = seconds_of_first_micro_step(policy, measured.step);
  measured.placement_seconds = seconds / static_cast<double>(context.pool.num_threads());
  const int layers = measured.step.plan.num_layers();
  if (context.cost != nullptr && layers > 0) {  // a layer of the input stands for as many of the model
    measured.placement_seconds *= static_cast<double>(context.cost->model().moe_layers) / layers;
  }
  return measured;
}

}  // namespace foremoe
