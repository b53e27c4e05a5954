#include "report_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/step_plan.h"
#include "messages.h"

namespace foremoe::cli {
namespace {

// In the order in which they occur.
std::vector<report::TimePart> parts_of(const PhaseSeconds& parts) {
  return {{"arena refresh", parts.arena_refresh},
          {"dense", parts.dense},
          {"planning", parts.planning},
          {"dispatch", parts.dispatch},
          {"experts", parts.experts},
          {"combine", parts.combine},
          {"exposed copies", parts.exposed_copies},
          {"exposed gradients", parts.exposed_gradients},
          {"optimizer", parts.optimizer}};
}

double as_double(Bytes bytes) { return static_cast<double>(bytes.value); }

void add_links(const SimulatedPhase& phase, std::vector<report::LinkBytes>& links) {
  for (const LinkTraffic& traffic : phase.traffic) {
    auto at = std::find_if(links.begin(), links.end(), [&](const auto& l) { return l.link == traffic.link; });
    if (at == links.end()) at = links.insert(links.end(), report::LinkBytes{.link = traffic.link});
    at->rows += as_double(traffic.rows);
    at->copies += as_double(traffic.copies);
    at->gradients += as_double(traffic.gradients);
    at->busiest_use = std::max(at->busiest_use, traffic.busiest_use);
  }
}

}  // namespace

CheckedSimulation simulate_checked(const ReportProblem& problem, const Policy& policy, const PlannerOptions& options) {
  SimulationResult result =
      simulate_policy({.policy = policy, .input = problem.input, .options = options, .align = problem.align},
                      problem.setup, problem.pool);
  const auto* const simulated = std::get_if<SimulatedPolicy>(&result);
  if (simulated == nullptr) return {.result = std::move(result)};
  const Activity activity(fmt::format("checking the plan of {}", policy.name()));
  const StepInput& step = problem.input.step;
  const CheckReport report = check_plan(simulated->measured.plan, step.load,
                                        {.initial_home = problem.input.homes,
                                         .align = problem.align,
                                         .trace = step.trace_or_null(),
                                         .batching = step.batching_or_null(),
                                         .reported = &simulated->measured.figures});
  if (report.ok()) return {.result = std::move(result)};
  return {.result = Skipped{fmt::format("its plan is WRONG: {}", report.violations.front().message)}, .wrong = true};
}

std::vector<double> imbalances(const StepPlan& plan) {
  const Array<Tokens, 3> loads = planned_loads(plan);
  std::vector<double> rho;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int m = 0; m < plan.num_micro_steps(); ++m) {
      if (const std::optional<double> here = imbalance(loads.row(m, l))) rho.push_back(*here);
    }
  }
  return rho;
}

report::PolicyResult figures_of(const SimulatedPolicy& simulated, const SimulatedStep& vanilla) {
  const SimulatedStep& step = simulated.step;
  const auto guests = [](const SimulatedPhase& phase) {
    return as_double(phase.memory.guest_weights) + as_double(phase.memory.guest_gradients);
  };
  report::PolicyResult figures{
      .policy = simulated.policy,
      .residency = std::string(to_string(simulated.measured.plan.residency)),
      .rho = imbalances(simulated.measured.plan),
      .copies_per_layer_event = simulated.measured.figures.copies_per_layer_event,
      .home_moves = simulated.measured.figures.home_moves,
      .plan_us = simulated.measured.us_per_layer_micro_step(),
      .recompute = {.parts = parts_of(step.recompute.parts), .ideal_seconds = step.recompute.ideal_seconds},
      .policy_update = {.parts = parts_of(step.policy_update.parts), .ideal_seconds = step.policy_update.ideal_seconds},
      .step_seconds = step.step_seconds,
      .ideal_step_seconds = step.ideal_step_seconds,
      .exposed_copy_seconds = step.exposed_copy_seconds,
      .speedup = speedup(vanilla.step_seconds, step.step_seconds),
      .memory_bytes = as_double(step.memory_bytes_per_rank),
      .guest_bytes = std::max(guests(step.recompute), guests(step.policy_update)),
      .peak_tokens = step.peak_tokens_per_rank.value};
  if (step.home_move_seconds > 0) {
    figures.policy_update.parts.insert(figures.policy_update.parts.begin(), {"homes moved", step.home_move_seconds});
  }
  if (step.rl_step_seconds > step.step_seconds) {
    figures.rl_speedup = speedup(vanilla.rl_step_seconds, step.rl_step_seconds);
  }
  if (simulated.largest_micro_batch_tokens) {
    figures.largest_micro_batch = simulated.largest_micro_batch_tokens->value;
  }
  add_links(step.recompute, figures.links);
  add_links(step.policy_update, figures.links);
  return figures;
}

report::NodeTraffic node_traffic(const SimulatedPolicy& simulated) {
  const SimulatedStep& step = simulated.step;
  report::NodeTraffic traffic{.policy = simulated.policy,
                              .bytes = Array<double, 2>(step.policy_update.between_nodes.shape())};
  for (const SimulatedPhase* phase : {&step.recompute, &step.policy_update}) {
    const auto bytes = phase->between_nodes.flat();
    for (std::size_t i = 0; i < std::min(bytes.size(), traffic.bytes.size()); ++i) {
      traffic.bytes.flat()[i] += as_double(bytes[i]);
    }
  }
  return traffic;
}

}  // namespace foremoe::cli
