#include "foremoe/evaluate/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate_plan.h"
#include "foremoe/evaluate/measured_plan.h"
#include "foremoe/evaluate/memory_budget.h"
#include "foremoe/evaluate/plan_choice.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/sim/phase_profile.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {
namespace {

// The arguments of evaluate(), with prices and hidden_copies resolved to numbers.
struct Case {
  const Policy* policy;
  const Workload& workload;
  EvaluateOptions options;
  EvaluationContext context;
  int runs = kPlanningRuns;
  bool compares = false;   // only the seconds and the memory of the step are wanted
  bool framework = false;  // the step with kFrameworkSeconds is wanted too

  void progress(const char* what) const {
    context.pool.throw_if_cancelled();
    if (context.progress) context.progress(fmt::format("{} {}", what, policy->name()));
  }
  Planners planners() const {
    return {.count = options.planners > 0 ? options.planners : workload.load.num_ranks(),
            .threads = options.planning_threads,
            .gather_seconds = options.plan_gather_seconds};
  }
  CheckOptions check_options(const PlanFigures* reported) const {
    CheckOptions check = foremoe::check_options(workload, reported, options.align);
    check.pool = &context.pool;
    return check;
  }
};

std::optional<MeasuredPlan> plan_recompute(const Case& c, std::string& why_not) {
  PlannerOptions planner = c.options.planner;
  planner.in_flight = 1;
  return plan_measured(*c.policy, c.workload, {planner, c.planners(), c.runs}, c.context, why_not);
}

// Fills in the figures. If plan_figures() rejects the plan, returns the error if check_plan will report the cause, and
// otherwise throws it.
std::optional<InputError> measure(const Case& c, Evaluation& e) {
  try {
    e.figures = plan_figures(e.plan, c.workload.load,
                             {.initial_home = c.workload.homes,
                              .align = c.options.align,
                              .tokens = c.compares ? nullptr : c.workload.tokens_of_load(),
                              .pool = &c.context.pool});
    return std::nullopt;
  } catch (const InputError& error) {
    if (!c.options.check) throw;
    return error;
  }
}

// Checks both plans. reported: the figures of the policy update's plan, or null.
void check(const Case& c, Evaluation& e, const PlanFigures* reported) {
  if (!c.options.check) return;
  c.progress("checking the plan of");
  e.check = check_plan(e.plan, c.workload.load, c.check_options(reported));
  if (!e.recompute_plan || !e.check.ok()) return;
  CheckReport report = check_plan(*e.recompute_plan, c.workload.load, c.check_options(nullptr));
  if (!report.ok()) e.check = std::move(report);
}

// An arena is filled with the experts of the whole phase, so the whole phase must be planned before.
bool fills_arena(const Evaluation& e) {
  const auto fills = [&](Phase phase, const SimulatedPhase& simulated) {
    return e.plan_of(phase).residency == Residency::kShared && simulated.arena > Bytes{0};
  };
  return fills(Phase::kRecompute, e.step->recompute) || fills(Phase::kPolicyUpdate, e.step->policy_update);
}

void simulate(const Case& c, Evaluation& e) {
  if (c.context.cost == nullptr) return;
  c.progress("simulating");
  const Array<double, 2> squared_lengths = c.workload.squared_lengths();
  const StepPlan* const recompute = e.recompute_plan ? &*e.recompute_plan : nullptr;
  StepOptions options{.phase = {.path = c.options.path,
                                .depth = c.options.depth,
                                .online = c.policy->online(),
                                .plans_ahead = c.policy->plans_ahead(c.workload.for_policy(c.options.planner)),
                                .pool = &c.context.pool,
                                .timeline = c.context.timeline},
                      .home_moves = e.figures.home_moves,
                      .rollout_seconds = c.options.rollout_seconds,
                      .placement_seconds = e.placement_seconds,
                      .rollout_tail_seconds = c.options.rollout_tail_seconds};
  const auto input_with = [&](const CostModel& cost) {
    return SimulationInput{.load = c.workload.load,
                           .plan = e.plan,
                           .cost = cost,
                           .tokens = c.workload.tokens_of_load(),
                           .fitted = c.workload.fitted.get(),
                           .rows = c.options.rows,
                           .squared_lengths = squared_lengths};
  };
  const SimulationInput input = input_with(*c.context.cost);
  const StepProfile profile = profile_step(input, recompute, options.phase.online, c.context.pool);
  e.step = simulate_step(input, recompute, options, &profile);
  if (c.framework && c.context.cost->options().other_seconds_per_layer == 0) {
    CostOptions with_framework = c.context.cost->options();
    with_framework.other_seconds_per_layer = kFrameworkSeconds;
    const CostModel cost(c.context.cost->cluster(), c.context.cost->model(), with_framework);
    options.phase.timeline = nullptr;
    e.framework_step_seconds = simulate_step(input_with(cost), recompute, options, &profile).step_seconds;
  }
  if (fills_arena(e)) {
    e.placement_seconds = e.whole_placement_seconds;
    charge_placement(e.placement_seconds, c.options.rollout_tail_seconds, *e.step);
  }
  if (const auto budget = c.options.memory_budget()) {
    e.largest_micro_batch_tokens = largest_micro_batch(*e.step, *budget, mean_tokens_per_rank(c.workload.load));
  }
}

// Measures, checks and simulates the plans of `e`.
void judge(const Case& c, Evaluation& e) {
  const std::optional<InputError> unmeasured = measure(c, e);
  check(c, e, unmeasured ? nullptr : &e.figures);
  if (unmeasured && e.check.ok()) throw InputError(*unmeasured);
  if (e.check.ok()) simulate(c, e);
}

Evaluation plan_and_judge(const Case& c) {
  Evaluation e{.policy = std::string(c.policy->name())};
  c.progress("planning with");
  const Planners planners = c.planners();
  std::optional<MeasuredPlan> update =
      plan_measured(*c.policy, c.workload, {c.options.planner, planners, c.runs}, c.context, e.skipped);
  if (!update) return e;
  e.plan = std::move(update->step.plan);
  e.times = update->step.times;
  e.placement_seconds = update->placement_seconds;
  e.whole_placement_seconds = update->whole_placement_seconds;
  e.planners = planners.count;
  e.threads = static_cast<int>(c.context.pool.num_threads());
  if (e.plan.in_flight > 1 && c.context.cost != nullptr) {
    std::optional<MeasuredPlan> recompute = plan_recompute(c, e.skipped);
    if (!recompute) return e;
    e.recompute_plan = std::move(recompute->step.plan);
    e.placement_seconds += recompute->placement_seconds;
    e.whole_placement_seconds += recompute->whole_placement_seconds;
  }
  judge(c, e);
  return e;
}

// Seconds for which the step waits for the plans of `e`.
double estimated_placement(const Case& c, const Evaluation& e) {
  const std::vector of_layer{estimated_planning_seconds(c.workload.load, e.plan.residency, fills_arena(e))};
  const double of_plan = planning_seconds(of_layer, c.context.cost->model().moe_layers, c.planners());
  return std::max(0.0, (e.recompute_plan ? 2 : 1) * of_plan - c.options.rollout_tail_seconds);
}

// Plans and simulates as the trial says, once and unchecked. Fills in the trial's results. Returns false if there is no
// plan.
bool try_plan(Case c, PlanTrial& trial) {
  c.context.timeline = nullptr;
  c.options.check = false;
  c.runs = 1;
  c.compares = true;
  c.framework = false;
  if (trial.planned) {
    c.options.planner = options_of(trial, c.options.planner);
  } else {
    c.policy = &policy_named("vanilla");
  }
  const Evaluation e = plan_and_judge(c);
  if (!e.step) return false;
  trial.memory = e.step->memory_bytes_per_rank;
  trial.seconds = e.step->step_seconds;
  if (trial.planned) trial.seconds += estimated_placement(c, e);
  return true;
}

// Returns nullopt if the policy cannot plan the workload.
std::optional<PlanChoice> choose(const Case& c) {
  std::vector<PlanTrial> trials = trials_among(c.options.choose, c.options.planner);
  for (PlanTrial& trial : trials) {
    if (!try_plan(c, trial)) return std::nullopt;
  }
  return choose_plan(std::move(trials), c.options.memory_budget());
}

// Plans, checks and simulates the best trial of those that the options ask for.
Evaluation with_best_plan(Case c) {
  std::optional<PlanChoice> choice = choose(c);
  if (!choice) return plan_and_judge(c);
  const std::string_view name = c.policy->name();
  if (choice->best().planned) {
    c.options.planner = options_of(choice->best(), c.options.planner);
  } else {
    c.policy = &policy_named("vanilla");
  }
  Evaluation best = plan_and_judge(c);
  best.policy = name;
  best.choice = *std::move(choice);
  return best;
}

Case case_of(const Policy& policy, const Workload& workload, const EvaluateOptions& options,
             const EvaluationContext& context) {
  expect_valid(workload.load, workload.load.name);
  if (options.planning_threads < 1 || options.planners < 0) {
    throw InputError({.field = "planning_threads"}, "must be at least 1, and `planners` at least 0");
  }
  return {.policy = &policy, .workload = workload, .options = options, .context = context};
}

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
  if (vanilla.framework_step_seconds && evaluation.framework_step_seconds) {
    evaluation.framework_speedup = speedup(*vanilla.framework_step_seconds, *evaluation.framework_step_seconds);
  }
}

void expect_residency(const Evaluation& evaluation, std::optional<Residency> asked) {
  if (!asked || !evaluation.planned() || evaluation.plan.residency == *asked) return;
  throw InputError({.field = "residency"}, fmt::format("policy {} plans residency {}, not {}", evaluation.policy,
                                                       to_string(evaluation.plan.residency), to_string(*asked)));
}

CheckOptions check_options(const Workload& workload, const PlanFigures* reported, int align) {
  return {.initial_home = workload.homes, .align = align, .tokens = workload.tokens_of_load(), .reported = reported};
}

// Sets the price of a copy for Prefer::kTime. Its weights cross a link in each phase, and its gradient once. A token
// that leaves its node crosses one of the node's links twice per round trip. Copies may travel while a layer computes.
static void price_copies(const LoadTable& load, const CostModel& cost, PlannerOptions& planner) {
  const Tokens tokens = mean_tokens_per_rank(load);
  const std::int64_t batches = std::int64_t{1} * load.num_micro_steps() * load.num_layers() * load.num_ranks();
  const std::int64_t mean = num_assignments(load) / std::max(batches, std::int64_t{1});  // fewer if rows are short
  const Tokens assignments{std::max<std::int64_t>(1, std::min(tokens.value * load.top_k, mean))};
  const auto weights = static_cast<double>(cost.expert_weights().value);
  const double copy = 2 * weights + static_cast<double>(cost.expert_gradient().value);
  // The forward passes of recompute and policy update, and the backward.
  const int round_trips = 2 * cost.round_trips(Pass::kForward) + cost.round_trips(Pass::kBackward);
  double token = 2.0 * round_trips * static_cast<double>(cost.row().value) / load.ranks_per_node;
  if (cost.options().dispatch == Dispatch::kToken) {  // it leaves anyway if another of its experts is on that node
    double nodes = load.topology().num_nodes();
    const ExpertGroups& groups = cost.model().groups;
    if (groups.count > 1) nodes = std::max(1.0, nodes * groups.per_token / groups.count);
    token *= std::pow(1 - 1 / nodes, load.top_k - 1);
  }
  const double window = cost.dense(tokens, Pass::kForward) + cost.experts({&assignments, 1}, Pass::kForward);
  // On one node, no token leaves its node, so no copy pays.
  planner.copy_price = std::min(copy / token / static_cast<double>(assignments.value), kMostCopyPrice);
  if (!planner.free_copies) {
    const double hidden = window * cost.cluster().network.bytes_per_second / weights;
    // Another layer must compute before the layer that needs the copy. No layer does before the first one.
    const double layers = cost.model().moe_layers;
    planner.free_copies = hidden * (layers - 1) / layers;
  }
}

PlannerOptions planner_options(const EvaluateOptions& options, const LoadTable& load, const CostModel* cost) {
  PlannerOptions planner = options.planner;
  const bool priced = planner.prefer.value_or(Prefer::kTime) == Prefer::kTime;
  if (priced && !planner.copy_price && cost != nullptr) price_copies(load, *cost, planner);
  if (!options.hidden_copies) return planner;
  if (cost == nullptr) {
    throw InputError({.field = "max_copies_per_rank"}, "hidden needs `cluster` and `model`");
  }
  const auto hidden = cost->hidden_copies(mean_tokens_per_rank(load));
  if (load.topology().num_nodes() > 1) {
    planner.max_copies_per_rank = hidden.from_host;  // arenas serve these copies; homes send none of them
    return planner;
  }
  planner.max_copies_per_rank = hidden.from_host + hidden.from_peers;
  // Homes send peers the copies that the arena does not serve, so a home's link can be the busiest.
  if (*planner.max_copies_per_rank < load.num_ranks() * planner.guest_slots) {  // otherwise this is no limit
    planner.max_copies_per_source = std::min(planner.max_copies_per_source, *planner.max_copies_per_rank);
  }
  return planner;
}

EvaluationContext one_of(const EvaluationContext& context, std::size_t index, std::size_t count) {
  EvaluationContext one = context;
  if (context.progress && count > 1) {
    one.progress = [tell = context.progress, index, count](const std::string& what) {
      tell(fmt::format("{} of {}, {}", index + 1, count, what));
    };
  }
  return one;
}

PlanChoice choose_plan(const Workload& workload, const EvaluateOptions& options, const EvaluationContext& context) {
  Case c = case_of(policy_named("foremoe"), workload, options, context);
  c.options.planner = planner_options(options, workload.load, context.cost);
  std::optional<PlanChoice> choice = choose(c);
  if (!choice) throw InputError({.file = workload.load.name}, "policy foremoe cannot plan it");
  return *std::move(choice);
}

static Evaluation evaluate(Case c) {
  const CostModel* const cost = c.context.cost;
  if (c.options.choose == ChooseAmong::kAll && cost == nullptr) {
    throw InputError({.field = "residency"}, "auto needs `cluster` and `model`");
  }
  c.options.planner = planner_options(c.options, c.workload.load, cost);
  const bool chooses = c.options.choose != ChooseAmong::kGiven && cost != nullptr && c.policy->plans_as_asked();
  if (!c.options.simulate && !chooses) c.context.cost = nullptr;
  Evaluation e = chooses ? with_best_plan(c) : plan_and_judge(c);
  if (!c.options.simulate) e.step.reset();
  return e;
}

Evaluation evaluate(const Policy& policy, const Workload& workload, const EvaluateOptions& options,
                    const EvaluationContext& context) {
  return evaluate(case_of(policy, workload, options, context));
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

Evaluation evaluate_plan(const Policy& policy, PlansOfStep plans, const Workload& workload,
                         const EvaluateOptions& options, const EvaluationContext& context) {
  Case c = case_of(policy, workload, options, context);
  if (!options.simulate) c.context.cost = nullptr;
  const int in_flight = plans.policy_update.in_flight;
  if (c.context.cost != nullptr && in_flight != 1 && !plans.recompute) {
    throw InputError({.field = "recompute_plan"},
                     fmt::format("is missing, and the plan has {} micro-steps in flight", in_flight));
  }
  if (plans.recompute && plans.recompute->in_flight != 1) {
    throw InputError({.field = "recompute_plan"},
                     fmt::format("has {} micro-steps in flight, expected 1", plans.recompute->in_flight));
  }
  Evaluation e{.policy = std::string(policy.name()),
               .plan = std::move(plans.policy_update),
               .recompute_plan = std::move(plans.recompute),
               .threads = static_cast<int>(context.pool.num_threads())};
  judge(c, e);
  return e;
}

std::vector<Evaluation> evaluate_all(std::span<const Policy* const> policies, const Workload& workload,
                                     const EvaluateOptions& options, const EvaluationContext& context) {
  EvaluationContext quiet = context;
  quiet.timeline = nullptr;
  const Policy* const baseline = &policy_named("vanilla");
  const auto evaluated = [&](const Policy& policy, const EvaluationContext& one) {
    Case c = case_of(policy, workload, options, one);
    c.framework = options.simulate;
    return evaluate(c);
  };
  const Evaluation vanilla = evaluated(*baseline, quiet);
  if (!vanilla.check.ok() && std::ranges::find(policies, baseline) == policies.end()) {
    throw std::logic_error("the plan of vanilla, the baseline of all comparisons, is wrong: " +
                           vanilla.check.violations.front().message);
  }
  std::optional<double> homes_speedup;
  if (vanilla.step && !recorded_digest(workload.homes, workload.load).empty()) {
    Workload contiguous = workload;
    contiguous.homes = contiguous_homes(workload.load);
    const Evaluation before = evaluate(*baseline, contiguous, options, quiet);
    homes_speedup = speedup(before.step->step_seconds, vanilla.step->step_seconds);
  }
  std::vector<Evaluation> evaluations;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const EvaluationContext one = one_of(quiet, i, policies.size());
    evaluations.push_back(policies[i] == baseline ? vanilla : evaluated(*policies[i], one));
    compare_with(vanilla, evaluations.back());
    evaluations.back().homes_speedup = homes_speedup;
  }
  for (std::size_t i = evaluations.size(); context.timeline != nullptr && i-- > 0;) {
    if (!evaluations[i].step) continue;
    simulate(case_of(*policies[i], workload, options, context), evaluations[i]);
    break;
  }
  return evaluations;
}

}  // namespace foremoe
