#include "foremoe/evaluate/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate_plan.h"
#include "foremoe/evaluate/measured_plan.h"
#include "foremoe/evaluate/memory_budget.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {
namespace {

// Tokens of a rank's micro-step in the mean, as a micro-batch is counted: not their assignments.
Tokens mean_tokens_per_rank(const LoadTable& load) {
  const std::int64_t batches =
      std::int64_t{1} * load.num_micro_steps() * load.num_layers() * load.num_ranks() * load.top_k;
  return Tokens{batches == 0 ? 0 : num_assignments(load) / batches};
}

// One policy on one input.
class Evaluator {
 public:
  Evaluator(const Policy& policy, const StepInput& input, const EvaluateOptions& options, EvaluationContext context)
      : policy_(policy), input_(input), options_(options), context_(std::move(context)) {}

  // With the residency that the options ask for.
  Evaluation as_asked() const {
    Evaluation e{.policy = std::string(policy_.name())};
    if (!plan(options_.planner, e)) return e;
    if (e.plan.in_flight > 1 && context_.cost != nullptr) {
      std::optional<MeasuredPlan> recompute = plan_recompute(options_.planner.residency, e.skipped);
      if (!recompute) return e;
      e.recompute_plan = std::move(recompute->step.plan);
      e.placement_seconds += recompute->placement_seconds;
      e.whole_placement_seconds += recompute->whole_placement_seconds;
    }
    finish(e);
    return e;
  }

  Evaluation of(PlansOfStep plans) const {
    Evaluation e{.policy = std::string(policy_.name()),
                 .plan = std::move(plans.policy_update),
                 .recompute_plan = std::move(plans.recompute)};
    e.threads = static_cast<int>(context_.pool.num_threads());
    finish(e);
    return e;
  }

  Evaluation with_best_residency() const {
    std::vector<Evaluation> tried;
    std::vector<ResidencyTrial> trials;
    for (const Residency residency : {Residency::kShared, Residency::kStatic, Residency::kResident}) {
      Evaluation one = Evaluator(policy_, input_, with(residency), quiet()).as_asked();
      if (!one.check.ok()) return one;
      if (!one.step || one.plan.residency != residency) return as_asked();  // it has its own
      trials.push_back(trial_of(one));
      tried.push_back(std::move(one));
    }
    double placement_seconds = 0;  // all are planned before one is chosen
    for (const Evaluation& one : tried) placement_seconds += one.placement_seconds;
    Evaluation best = std::move(tried[choose_residency(trials, options_.memory_budget()).trial]);
    best.whole_placement_seconds += placement_seconds - best.placement_seconds;
    best.placement_seconds = placement_seconds;
    try_free_recompute(best);
    if (best.step) charge_placement(best.placement_seconds, options_.rollout_tail_seconds, *best.step);
    if (best.step && context_.timeline != nullptr) simulate(best);
    return best;
  }

  void simulate(Evaluation& e) const {
    if (context_.cost == nullptr) return;
    progress("simulating");
    e.step = simulate_step(phase_input(e.plan), e.recompute_plan ? &*e.recompute_plan : nullptr,
                           {.phase = {.path = options_.path,
                                      .depth = options_.depth,
                                      .online = policy_.online(),
                                      .plans_ahead = policy_.plans_ahead(input_.for_policy(options_.planner)),
                                      .pool = &context_.pool,
                                      .timeline = context_.timeline},
                            .home_moves = e.figures.home_moves,
                            .rollout_seconds = options_.rollout_seconds,
                            .placement_seconds = e.placement_seconds,
                            .rollout_tail_seconds = options_.rollout_tail_seconds});
    const auto fills_arena = [&](Phase phase, const SimulatedPhase& of) {
      return e.plan_of(phase).residency == Residency::kShared && of.arena > Bytes{0};
    };
    if (fills_arena(Phase::kRecompute, e.step->recompute) || fills_arena(Phase::kPolicyUpdate, e.step->policy_update)) {
      e.placement_seconds = e.whole_placement_seconds;
      charge_placement(e.placement_seconds, options_.rollout_tail_seconds, *e.step);
    }
    if (const auto budget = options_.memory_budget()) {
      e.largest_micro_batch_tokens = largest_micro_batch(*e.step, *budget, mean_tokens_per_rank(input_.load));
    }
  }

 private:
  void finish(Evaluation& e) const {
    const std::optional<InputError> unmeasured = measure(e);
    check(e, unmeasured ? nullptr : &e.figures);
    if (unmeasured && e.check.ok()) throw InputError(*unmeasured);
    if (e.check.ok()) simulate(e);
  }

  // Fills in `check`, of both plans. reported: the figures of the policy update's plan; null: none.
  void check(Evaluation& e, const PlanFigures* reported) const {
    if (!options_.check) return;
    progress("checking the plan of");
    e.check = check_plan(e.plan, input_.load, interruptible_check(reported));
    if (!e.recompute_plan || !e.check.ok()) return;
    CheckReport report = check_plan(*e.recompute_plan, input_.load, interruptible_check(nullptr));
    if (!report.ok()) e.check = std::move(report);
  }

  CheckOptions interruptible_check(const PlanFigures* reported) const {
    CheckOptions options = check_options(input_, reported, options_.align);
    options.pool = &context_.pool;
    return options;
  }

  // Fills in the figures. Returns the error of a plan that is too broken to measure, if a check will say what is wrong.
  std::optional<InputError> measure(Evaluation& e) const {
    try {
      e.figures = plan_figures(e.plan, input_.load,
                               {.initial_home = input_.homes,
                                .align = options_.align,
                                .trace = input_.trace_or_null(),
                                .batching = input_.batching_or_null(),
                                .pool = &context_.pool});
      return std::nullopt;
    } catch (const InputError& error) {
      if (!options_.check) throw;
      return error;
    }
  }

  void progress(const char* what) const {
    context_.pool.expect_going_on();
    if (context_.progress) context_.progress(fmt::format("{} {}", what, policy_.name()));
  }

  EvaluateOptions with(Residency residency) const {
    EvaluateOptions options = options_;
    options.planner.residency = residency;
    return options;
  }

  EvaluationContext quiet() const {
    EvaluationContext context = context_;
    context.timeline = nullptr;
    return context;
  }

  bool plan(const PlannerOptions& planner, Evaluation& e) const {
    progress("planning with");
    std::optional<MeasuredPlan> measured = plan_measured(policy_, input_, {planner, planners()}, context_, e.skipped);
    if (!measured) return false;
    e.plan = std::move(measured->step.plan);
    e.times = measured->step.times;
    e.placement_seconds = measured->placement_seconds;
    e.whole_placement_seconds = measured->whole_placement_seconds;
    e.planners = planners().count;
    e.threads = static_cast<int>(context_.pool.num_threads());
    return true;
  }

  Planners planners() const {
    return {.count = options_.planners > 0 ? options_.planners : input_.load.num_ranks(),
            .threads = options_.planning_threads,
            .gather_seconds = options_.plan_gather_seconds};
  }

  std::optional<MeasuredPlan> plan_recompute(Residency residency, std::string& why_not) const {
    PlannerOptions planner = options_.planner;
    planner.in_flight = 1;
    planner.residency = residency;
    return plan_measured(policy_, input_, {planner, planners()}, context_, why_not);
  }

  // Recompute needs no homes that stay, so it may also place freely.
  void try_free_recompute(Evaluation& best) const {
    std::string why_not;
    std::optional<MeasuredPlan> free = plan_recompute(Residency::kFree, why_not);
    if (!free) return;
    best.placement_seconds += free->placement_seconds;
    best.whole_placement_seconds += free->placement_seconds;
    Evaluation other = best;
    other.recompute_plan = std::move(free->step.plan);
    check(other, &other.figures);
    if (!other.check.ok()) {
      best = std::move(other);
      best.step.reset();
      return;
    }
    Evaluator(policy_, input_, options_, quiet()).simulate(other);
    const std::array trials{trial_of(best), trial_of(other)};
    if (choose_residency(trials, options_.memory_budget()).trial == 1) best = std::move(other);
  }

  static ResidencyTrial trial_of(const Evaluation& e) {
    return {.step_seconds = e.step->step_seconds, .memory = e.step->memory_bytes_per_rank};
  }

  SimulationInput phase_input(const StepPlan& plan) const {
    return {.load = input_.load,
            .plan = plan,
            .cost = *context_.cost,
            .trace = input_.trace_or_null(),
            .batching = input_.batching_or_null()};
  }

  const Policy& policy_;
  const StepInput& input_;
  const EvaluateOptions options_;
  const EvaluationContext context_;
};

}  // namespace

std::optional<Bytes> EvaluateOptions::memory_budget() const {
  if (memory_budget_gigabytes <= 0) return std::nullopt;
  return Bytes{static_cast<std::int64_t>(memory_budget_gigabytes * kBytesPerGigabyte)};
}

const StepPlan& Evaluation::plan_of(Phase phase) const {
  return phase == Phase::kRecompute && recompute_plan ? *recompute_plan : plan;
}

double Evaluation::us_per_layer_micro_step() const {
  const double pairs = static_cast<double>(figures.layers) * figures.micro_steps;
  return 1e6 * times.planning_cpu_seconds / std::max(1.0, pairs);
}

double Evaluation::fraction_of_ideal() const { return step->ideal_step_seconds / step->step_seconds; }

double speedup(double before_seconds, double after_seconds) {
  return after_seconds > 0 ? before_seconds / after_seconds : 1;
}

void compare_with(const Evaluation& vanilla, Evaluation& evaluation) {
  if (!vanilla.step || !evaluation.step) return;
  evaluation.speedup_over_vanilla = speedup(vanilla.step->step_seconds, evaluation.step->step_seconds);
  evaluation.placed_speedup = speedup(vanilla.step->step_seconds, evaluation.step->placed_step_seconds);
  evaluation.rl_step_speedup = speedup(vanilla.step->rl_step_seconds, evaluation.step->rl_step_seconds);
}

void expect_residency(const Evaluation& evaluation, std::optional<Residency> asked) {
  if (!asked || !evaluation.planned() || evaluation.plan.residency == *asked) return;
  throw InputError({.field = "residency"}, fmt::format("policy {} plans residency {}, not {}", evaluation.policy,
                                                       to_string(evaluation.plan.residency), to_string(*asked)));
}

CheckOptions check_options(const StepInput& input, const PlanFigures* reported, int align) {
  return {.initial_home = input.homes,
          .align = align,
          .trace = input.trace_or_null(),
          .batching = input.batching_or_null(),
          .reported = reported};
}

PlannerOptions planner_options(const EvaluateOptions& options, const LoadTable& load, const CostModel* cost) {
  PlannerOptions planner = options.planner;
  if (!options.hidden_copies) return planner;
  if (cost == nullptr) {
    throw InputError({.field = "max_copies_per_rank"}, "hidden needs `cluster` and `model`");
  }
  const auto hidden = cost->hidden_copies(mean_tokens_per_rank(load));
  if (load.topology().num_nodes() > 1) {
    planner.max_copies_per_rank = hidden.from_host;  // an arena serves them, whose experts no home sends meanwhile
    return planner;
  }
  planner.max_copies_per_rank = hidden.from_host + hidden.from_peers;
  // The link of a home can be the busiest: it sends to peers what the arena does not serve.
  if (*planner.max_copies_per_rank < load.num_ranks() * planner.guest_slots) {  // else it is no limit
    planner.max_copies_per_source = std::min(planner.max_copies_per_source, *planner.max_copies_per_rank);
  }
  return planner;
}

Evaluation evaluate(const Policy& policy, const StepInput& input, const EvaluateOptions& options,
                    const EvaluationContext& context) {
  if (options.choose_residency && context.cost == nullptr) {
    throw InputError({.field = "residency"}, "auto needs `cluster` and `model`");
  }
  EvaluateOptions resolved = options;
  resolved.planner = planner_options(options, input.load, context.cost);
  EvaluationContext used = context;
  if (!options.simulate) used.cost = nullptr;
  Evaluator evaluator(policy, input, resolved, std::move(used));
  return options.choose_residency ? evaluator.with_best_residency() : evaluator.as_asked();
}

StepPlan with_quotas(StepPlan plan, Array<Tokens, 4> slot_tokens, const LoadTable& load) {
  if (slot_tokens.shape() != plan.slot_tokens.shape()) {
    throw InputError({.field = "slot_tokens"}, "are not [events, layers, ranks, slots] of the plan");
  }
  plan.slot_tokens = std::move(slot_tokens);
  plan.max_load = {};
  plan.lower_bound = {};
  plan.load_digest = load_digest(load);
  return plan;
}

Evaluation evaluate_plan(const Policy& policy, PlansOfStep plans, const StepInput& input,
                         const EvaluateOptions& options, const EvaluationContext& context) {
  EvaluationContext used = context;
  if (!options.simulate) used.cost = nullptr;
  const int in_flight = plans.policy_update.in_flight;
  if (used.cost != nullptr && in_flight != 1 && !plans.recompute) {
    throw InputError({.field = "recompute_plan"},
                     fmt::format("is missing, and the plan has {} micro-steps in flight", in_flight));
  }
  if (plans.recompute && plans.recompute->in_flight != 1) {
    throw InputError({.field = "recompute_plan"},
                     fmt::format("has {} micro-steps in flight, expected 1", plans.recompute->in_flight));
  }
  return Evaluator(policy, input, options, std::move(used)).of(std::move(plans));
}

std::vector<Evaluation> evaluate_all(std::span<const Policy* const> policies, const StepInput& input,
                                     const EvaluateOptions& options, const EvaluationContext& context) {
  EvaluationContext quiet = context;
  quiet.timeline = nullptr;
  const Policy* const baseline = &policy_named("vanilla");
  const Evaluation vanilla = evaluate(*baseline, input, options, quiet);
  if (!vanilla.check.ok() && std::ranges::find(policies, baseline) == policies.end()) {
    throw std::logic_error("the plan of vanilla, with which all are compared, is wrong: " +
                           vanilla.check.violations.front().message);
  }
  std::vector<Evaluation> evaluations;
  for (const Policy* const policy : policies) {
    evaluations.push_back(policy == baseline ? vanilla : evaluate(*policy, input, options, quiet));
    compare_with(vanilla, evaluations.back());
  }
  for (std::size_t i = evaluations.size(); context.timeline != nullptr && i-- > 0;) {
    if (!evaluations[i].step) continue;
    Evaluator(*policies[i], input, options, context).simulate(evaluations[i]);
    break;
  }
  return evaluations;
}

}  // namespace foremoe
