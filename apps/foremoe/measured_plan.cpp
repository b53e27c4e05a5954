#include "measured_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/plan/plan_json.h"
#include "messages.h"

namespace foremoe::cli {

double MeasuredPlan::us_per_layer_micro_step() const {
  const double pairs = static_cast<double>(figures.layers) * figures.micro_steps;
  return 1e6 * times.planning_cpu_seconds / std::max(1.0, pairs);
}

std::variant<MeasuredPlan, Skipped> measure(const MeasureProblem& problem, ThreadPool& pool) {
  const Activity activity(fmt::format("planning with {}", problem.policy.name()));
  PolicyResult result = problem.policy.plan(problem.input.for_policy(problem.options), pool);
  if (auto* skipped = std::get_if<Skipped>(&result)) return std::move(*skipped);
  auto& planned = std::get<PlannedStep>(result);
  MeasuredPlan measured{.plan = std::move(planned.plan),
                        .times = planned.times,
                        .figures = {},
                        .threads = static_cast<int>(pool.num_threads())};
  const StepInput& step = problem.input.step;
  measured.figures = plan_figures(measured.plan, step.load,
                                  {.initial_home = problem.input.homes,
                                   .align = problem.align,
                                   .trace = step.trace_or_null(),
                                   .batching = step.batching_or_null()});
  return measured;
}

nlohmann::ordered_json to_json(const MeasuredPlan& measured) {
  nlohmann::ordered_json json = to_json(measured.figures);
  json["plan_seconds"] = measured.times.wall_seconds;
  json["plan_us_per_layer_micro_step"] = measured.us_per_layer_micro_step();
  json["threads"] = measured.threads;
  return json;
}

const Policy& policy_named(const std::string& name) {
  const Policy* const policy = find_policy(name);
  if (policy == nullptr) {
    std::string names;
    for (const Policy* p : all_policies()) names += fmt::format("{}{}", names.empty() ? "" : ", ", p->name());
    throw InputError({.file = "--policy", .field = {}, .index = {}},
                     fmt::format("'{}', expected one of {}", name, names));
  }
  return *policy;
}

std::vector<const Policy*> policies_named(const std::vector<std::string>& names) {
  std::vector<const Policy*> policies;
  for (const std::string& name : names) {
    if (name == "all") {
      for (const auto& policy : all_systems()) policies.push_back(policy.get());
    } else {
      policies.push_back(&policy_named(name));
    }
  }
  return policies;
}

std::string list_of_policies() {
  std::size_t width = 0;
  for (const Policy* policy : all_policies()) width = std::max(width, policy->name().size());
  std::string list;
  for (const Policy* policy : all_policies()) {
    list += fmt::format("  {:<{}}  {}\n", policy->name(), width, policy->summary());
  }
  return list;
}

}  // namespace foremoe::cli
