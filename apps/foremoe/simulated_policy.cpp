#include "simulated_policy.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>

#include "foremoe/sim/simulation.h"
#include "messages.h"

namespace foremoe::cli {
namespace {

// Tokens of a rank's micro-step in the mean, as a micro-batch is counted: not their assignments.
Tokens mean_tokens_per_rank(const LoadTable& load) {
  std::int64_t sum = 0;
  for (const Tokens tokens : load.load.flat()) sum += tokens.value;
  const std::int64_t batches =
      std::int64_t{1} * load.num_micro_steps() * load.num_layers() * load.num_ranks() * load.top_k;
  return Tokens{batches == 0 ? 0 : sum / batches};
}

SimulatedStep simulate(const MeasureProblem& problem, const SimulationSetup& setup, const SimulatedPolicy& planned,
                       ThreadPool& pool) {
  const Activity activity(fmt::format("simulating {}", problem.policy.name()));
  const StepInput& step = problem.input.step;
  const auto input = [&](const StepPlan& plan) {
    return SimulationInput{.load = step.load,
                           .plan = plan,
                           .cost = setup.cost,
                           .trace = step.trace_or_null(),
                           .batching = step.batching_or_null()};
  };
  const StepPlan& update = planned.measured.plan;
  return simulate_step(
      {.recompute = input(planned.recompute_plan ? *planned.recompute_plan : update), .policy_update = input(update)},
      {.phase = {.path = setup.path,
                 .depth = setup.depth,
                 .online = problem.policy.online(),
                 .pool = &pool,
                 .timeline = setup.timeline},
       .home_moves = planned.measured.figures.home_moves,
       .rollout_seconds = setup.rollout_seconds});
}

void compare(SimulatedPolicy& with, const SimulatedPolicy& vanilla) {
  with.speedup_over_vanilla = speedup(vanilla.step.step_seconds, with.step.step_seconds);
  with.rl_step_speedup = speedup(vanilla.step.rl_step_seconds, with.step.rl_step_seconds);
}

nlohmann::ordered_json to_json(const PhaseSeconds& parts) {
  return {{"arena_refresh", parts.arena_refresh},
          {"dense", parts.dense},
          {"planning", parts.planning},
          {"dispatch", parts.dispatch},
          {"experts", parts.experts},
          {"combine", parts.combine},
          {"exposed_copies", parts.exposed_copies},
          {"exposed_gradients", parts.exposed_gradients},
          {"optimizer", parts.optimizer}};
}

nlohmann::ordered_json to_json(const RankMemory& memory) {
  return {{"state", memory.state.value},
          {"guest_weights", memory.guest_weights.value},
          {"guest_gradients", memory.guest_gradients.value},
          {"activations", memory.activations.value}};
}

nlohmann::ordered_json to_json(const SimulatedPolicy& simulated) {
  nlohmann::ordered_json json = to_json(simulated.measured);
  const SimulatedStep& step = simulated.step;
  json["step_seconds"] = step.step_seconds;
  json["speedup_over_vanilla"] = simulated.speedup_over_vanilla;
  json["ideal_step_seconds"] = step.ideal_step_seconds;
  json["fraction_of_ideal"] = simulated.fraction_of_ideal();
  json["exposed_copy_seconds"] = step.exposed_copy_seconds;
  json["home_move_seconds"] = step.home_move_seconds;
  json["peak_tokens_per_rank"] = step.peak_tokens_per_rank.value;
  json["memory_bytes_per_rank"] = step.memory_bytes_per_rank.value;
  json["rl_step_seconds"] = step.rl_step_seconds;
  json["rl_step_speedup"] = simulated.rl_step_speedup;
  if (simulated.largest_micro_batch_tokens) {
    json["largest_micro_batch_tokens"] = simulated.largest_micro_batch_tokens->value;
  }
  json["recompute_residency"] =
      to_string(simulated.recompute_plan ? simulated.recompute_plan->residency : simulated.measured.plan.residency);
  json["stages"] = nlohmann::ordered_json::array({cli::to_json(step.recompute), cli::to_json(step.policy_update)});
  return json;
}

PolicyResult recompute_plan(const MeasureProblem& problem, Residency residency, ThreadPool& pool) {
  PlannerOptions options = problem.options;
  options.in_flight = 1;
  options.residency = residency;
  return problem.policy.plan(problem.input.for_policy(options), pool);
}

// What memory is left for tokens.
void measure_room(const MeasureProblem& problem, const SimulationSetup& setup, SimulatedPolicy& simulated) {
  if (!setup.memory_budget) return;
  simulated.largest_micro_batch_tokens =
      largest_micro_batch(simulated.step, *setup.memory_budget, mean_tokens_per_rank(problem.input.step.load));
}

ResidencyTrial trial_of(const SimulatedPolicy& simulated) {
  return {.step_seconds = simulated.step.step_seconds, .memory = simulated.step.memory_bytes_per_rank};
}

// The policy's plan of one residency; none where it is skipped, or does not do as told.
std::optional<SimulatedPolicy> simulate_residency(MeasureProblem problem, SimulationSetup setup, Residency residency,
                                                  ThreadPool& pool) {
  setup.choose_residency = false;
  setup.timeline = nullptr;
  problem.options.residency = residency;
  auto result = simulate_policy(problem, setup, pool);
  auto* const simulated = std::get_if<SimulatedPolicy>(&result);
  if (simulated == nullptr || simulated->measured.plan.residency != residency) return std::nullopt;
  return std::move(*simulated);
}

// A policy that has its own residency is simulated with that.
SimulationResult simulate_best_residency(const MeasureProblem& problem, SimulationSetup setup, ThreadPool& pool) {
  setup.choose_residency = false;
  std::vector<SimulatedPolicy> simulated;
  std::vector<ResidencyTrial> trials;
  for (const Residency residency : {Residency::kShared, Residency::kStatic, Residency::kResident}) {
    auto one = simulate_residency(problem, setup, residency, pool);
    if (!one) break;
    trials.push_back(trial_of(*one));
    simulated.push_back(std::move(*one));
  }
  if (simulated.size() < 3) return simulate_policy(problem, setup, pool);
  SimulatedPolicy best = std::move(simulated[choose_residency(trials, setup.memory_budget).trial]);

  // Recompute needs no homes that stay, so it may also place freely.
  auto free = recompute_plan(problem, Residency::kFree, pool);
  if (auto* const planned = std::get_if<PlannedStep>(&free)) {
    SimulatedPolicy other = best;
    other.recompute_plan = std::move(planned->plan);
    SimulationSetup silent = setup;
    silent.timeline = nullptr;
    other.step = simulate(problem, silent, other, pool);
    if (choose_residency(std::array{trial_of(best), trial_of(other)}, setup.memory_budget).trial == 1) {
      best = std::move(other);
      measure_room(problem, setup, best);
    }
  }
  if (setup.timeline != nullptr) best.step = simulate(problem, setup, best, pool);
  return best;
}

}  // namespace

nlohmann::ordered_json to_json(const SimulatedPhase& phase) {
  nlohmann::ordered_json traffic = nlohmann::ordered_json::array();
  for (const LinkTraffic& link : phase.traffic) {
    traffic.push_back({{"link", link.link},
                       {"row_bytes", link.rows.value},
                       {"copy_bytes", link.copies.value},
                       {"gradient_bytes", link.gradients.value},
                       {"busiest_bytes", link.busiest.value},
                       {"busiest_use", link.busiest_use}});
  }
  nlohmann::ordered_json between = nlohmann::ordered_json::array();
  for (std::size_t from = 0; from < phase.between_nodes.extent(0); ++from) {
    nlohmann::ordered_json row = nlohmann::ordered_json::array();
    for (const Bytes bytes : phase.between_nodes.row(from)) row.push_back(bytes.value);
    between.push_back(std::move(row));
  }
  return {{"stage", to_string(phase.phase)},
          {"seconds", phase.seconds},
          {"ideal_seconds", phase.ideal_seconds},
          {"utilisation", phase.utilisation},
          {"parts", to_json(phase.parts)},
          {"peak_tokens", phase.peak_tokens.value},
          {"copies", phase.copies},
          {"memory", to_json(phase.memory)},
          {"arena_bytes", phase.arena.value},
          {"traffic", std::move(traffic)},
          {"between_nodes", std::move(between)}};
}

double speedup(double before_seconds, double after_seconds) {
  return after_seconds > 0 ? before_seconds / after_seconds : 1;
}

SimulationResult simulate_policy(const MeasureProblem& problem, const SimulationSetup& setup, ThreadPool& pool) {
  if (setup.choose_residency) return simulate_best_residency(problem, setup, pool);
  auto update = measure(problem, pool);
  if (auto* skipped = std::get_if<Skipped>(&update)) return std::move(*skipped);
  SimulatedPolicy simulated{.policy = std::string(problem.policy.name()),
                            .measured = std::move(std::get<MeasuredPlan>(update))};
  if (simulated.measured.plan.in_flight > 1) {
    auto recompute = recompute_plan(problem, problem.options.residency, pool);
    if (auto* skipped = std::get_if<Skipped>(&recompute)) return std::move(*skipped);
    simulated.recompute_plan = std::move(std::get<PlannedStep>(recompute).plan);
  }
  simulated.step = simulate(problem, setup, simulated, pool);
  measure_room(problem, setup, simulated);
  return simulated;
}

std::vector<SimulatedRow> simulate_policies(const std::vector<const Policy*>& policies,
                                            const SimulationRequest& request, const SimulationSetup& setup,
                                            ThreadPool& pool) {
  const auto simulated = [&](const Policy& policy, Timeline* timeline) {
    SimulationSetup own = setup;
    own.timeline = timeline;
    return simulate_policy(
        {.policy = policy, .input = request.input, .options = request.options, .align = request.align}, own, pool);
  };
  const Policy& vanilla = policy_named("vanilla");
  const bool timeline_of_vanilla = !policies.empty() && policies.back() == &vanilla;
  const SimulationResult base = simulated(vanilla, timeline_of_vanilla ? setup.timeline : nullptr);
  std::vector<SimulatedRow> rows;
  for (const Policy* policy : policies) {
    rows.push_back({.policy = std::string(policy->name()),
                    .result = policy == &vanilla
                                  ? base
                                  : simulated(*policy, policy == policies.back() ? setup.timeline : nullptr)});
    auto* const row = std::get_if<SimulatedPolicy>(&rows.back().result);
    const auto* const before = std::get_if<SimulatedPolicy>(&base);
    if (row != nullptr && before != nullptr) compare(*row, *before);
  }
  // The last one skipped: its timeline is empty, so the one before it is simulated once more. Rare, and cheaper than
  // timelines of all.
  for (std::size_t i = rows.size(); setup.timeline != nullptr && i-- > 0;) {
    if (rows[i].get() == nullptr) continue;
    if (i + 1 < rows.size()) (void)simulated(*policies[i], setup.timeline);
    break;
  }
  return rows;
}

nlohmann::ordered_json to_json(const SimulatedRow& row) {
  if (const auto* skipped = std::get_if<Skipped>(&row.result)) {
    return {{"policy", row.policy}, {"skipped", skipped->reason}};
  }
  return to_json(std::get<SimulatedPolicy>(row.result));
}

}  // namespace foremoe::cli
