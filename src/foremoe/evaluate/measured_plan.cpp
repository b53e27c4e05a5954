#include "foremoe/evaluate/measured_plan.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace foremoe {
namespace {

struct Ahead {
  std::vector<double> first;  // [layer] CPU seconds before the first micro-step can begin
  std::vector<double> whole;  // [layer] until all micro-steps are planned
};

// If the policy plans between router and experts, OnlineWork already charges the work of each micro-step.
Ahead seconds_ahead(const Policy& policy, const PlanTimes& times) {
  const OnlineWork online = policy.online();
  Ahead ahead{times.once_of_layer, times.once_of_layer};
  if (online.planning_seconds > 0 || online.planning_seconds_per_slot > 0) return ahead;
  for (std::size_t l = 0; l < ahead.first.size(); ++l) {
    ahead.first[l] += times.first_of_layer[l];
    ahead.whole[l] = ahead.first[l] + (l < times.later_of_layer.size() ? times.later_of_layer[l] : 0);
  }
  return ahead;
}

void keep_least(std::vector<double>& seconds, const std::vector<double>& others) {
  std::ranges::transform(seconds, others, seconds.begin(), [](double a, double b) { return std::min(a, b); });
}

}  // namespace

double planning_seconds(std::span<const double> of_layer, int model_layers, const Planners& planners) {
  if (of_layer.empty()) return 0;
  const auto first_of = [&](std::int64_t planner) { return planner * model_layers / planners.count; };
  double slowest = 0;
  for (int p = 0; p < planners.count; ++p) {
    std::vector<double> threads(static_cast<std::size_t>(planners.threads));  // when each is free
    for (std::int64_t l = first_of(p); l < first_of(p + 1); ++l) {
      const auto of_input = static_cast<std::size_t>(l) * of_layer.size() / static_cast<std::size_t>(model_layers);
      *std::ranges::min_element(threads) += of_layer[of_input];
    }
    slowest = std::max(slowest, std::ranges::max(threads));
  }
  if (planners.count == 1) return slowest;
  return std::min(slowest + planners.gather_seconds,
                  planning_seconds(of_layer, model_layers, {.threads = planners.threads}));
}

std::optional<MeasuredPlan> plan_measured(const Policy& policy, const Workload& workload,
                                          const PlanningOptions& options, const EvaluationContext& context,
                                          std::string& why_not) {
  const PolicyInput policy_input = workload.for_policy(options.planner);
  PolicyResult result = plan_with(policy, workload, policy_input, context.pool);
  if (auto* const skipped = std::get_if<Skipped>(&result)) {
    why_not = std::move(skipped->reason);
    return std::nullopt;
  }
  MeasuredPlan measured{.step = std::move(std::get<PlannedStep>(result))};
  if (context.cost == nullptr || !policy.plans_ahead(policy_input)) return measured;
  Ahead seconds = seconds_ahead(policy, measured.step.times);
  for (int run = 1; run < options.runs; ++run) {
    const PolicyResult again = plan_with(policy, workload, policy_input, context.pool);
    const Ahead others = seconds_ahead(policy, std::get<PlannedStep>(again).times);
    keep_least(seconds.first, others.first);
    keep_least(seconds.whole, others.whole);
  }
  const int layers = context.cost->model().moe_layers;
  measured.placement_seconds = planning_seconds(seconds.first, layers, options.planners);
  measured.whole_placement_seconds = planning_seconds(seconds.whole, layers, options.planners);
  return measured;
}

}  // namespace foremoe
