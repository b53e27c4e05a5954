#include "foremoe/evaluate/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <stdexcept>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/memory_budget.h"
#include "foremoe/rollout/load_statistics.h"

namespace foremoe {
namespace {

Evaluation evaluate_valid(const Policy& policy, const Workload& workload, const EvaluateOptions& options,
                          const EvaluationContext& context) {
  Evaluation e = evaluate(policy, workload, options, context);
  if (!e.planned()) {
    throw InputError({.file = workload.load.name}, fmt::format("policy {} cannot plan it: {}", e.policy, e.skipped));
  }
  if (!e.check.ok()) {
    throw std::logic_error(fmt::format("the plan of {} is wrong: {}", e.policy, e.check.violations.front().message));
  }
  return e;
}

Evaluation evaluate_vanilla(const Workload& workload, const EvaluateOptions& options,
                            const EvaluationContext& context) {
  const LoadTable& load = workload.load;
  const Policy& vanilla = policy_named("vanilla");
  if (recorded_digest(workload.homes, load).empty()) {
    return evaluate_valid(vanilla, workload, options, context);
  }
  Workload contiguous = workload;
  contiguous.homes = contiguous_homes(load);
  return evaluate_valid(vanilla, contiguous, options, context);
}

// Visits the layers of all events of a step in execution order: visit(place, event, activations).
template <class Visit>
void for_each_place(const Evaluation& e, const CostModel& cost, Visit&& visit) {
  for (const SimulatedPhase* phase : {&e.step->recompute, &e.step->policy_update}) {
    const StepPlan& plan = e.plan_of(phase->phase);
    const Array<Tokens, 3> rows = planned_loads(plan);
    const Bytes per_row =
        cost.working_memory_per_row(phase->phase == Phase::kPolicyUpdate ? Pass::kBackward : Pass::kForward);
    const Bytes constant = phase->memory.sum() - phase->memory.activations;
    for (int t = 0; t < plan.num_events(); ++t) {
      const MicroStepId m = plan.event_micro_step[EventId{t}.index()];
      for (int l = 0; l < plan.num_layers(); ++l) {
        for (int r = 0; r < plan.num_ranks(); ++r) {
          const Activations& activations = phase->activations(t, r);
          FitPlace place{
              .phase = phase->phase, .micro_step = m, .layer = LayerId{l}, .rank = RankId{r}, .rows = rows(m, l, r)};
          place.memory = constant + activations.kept + Bytes{place.rows.value * per_row.value};
          visit(place, EventId{t}, activations);
        }
      }
    }
  }
}

FitOfPlan fit_of(Evaluation evaluation, const LoadTable& load, const CostModel& cost, Bytes limit) {
  FitOfPlan f{.evaluation = std::move(evaluation)};
  const Evaluation& e = f.evaluation;
  f.ranks.resize(load.load.extent(2));
  f.layers.resize(load.load.extent(1));
  f.micro_steps.resize(load.load.extent(0));
  f.most_rows.rows = Tokens{-1};
  EventId first;  // at which the limit is exceeded
  for_each_place(e, cost, [&](const FitPlace& place, EventId event, const Activations& activations) {
    if (place.rows > f.most_rows.rows) f.most_rows = place;
    if (place.memory > f.most_memory.memory) {
      f.most_memory = place;
      f.activations = activations;
    }
    if (place.memory > limit) {
      const bool same_event = f.exceeds && f.exceeds->phase == place.phase && first == event;
      if (!f.exceeds || (same_event && place.memory > f.exceeds->memory)) {
        f.exceeds = place;
        first = event;
      }
    }
    for (FitPeak* peak :
         {&f.ranks[place.rank.index()], &f.layers[place.layer.index()], &f.micro_steps[place.micro_step.index()]}) {
      peak->rows = std::max(peak->rows, place.rows);
      peak->memory = std::max(peak->memory, place.memory);
    }
  });
  const SimulatedStep& step = *e.step;
  f.terms = (f.most_memory.phase == Phase::kRecompute ? step.recompute : step.policy_update).memory;
  assert(f.most_memory.memory == step.memory_bytes_per_rank);
  f.largest_micro_batch = largest_micro_batch(step, limit, mean_tokens_per_rank(load));
  f.capacities = capacities(e.plan_of(Phase::kRecompute), e.plan, load, cost.model().moe_layers);
  return f;
}

// Fills in the fewest guest slots and the trials.
void find_guest_slots(const FitRequest& request, const EvaluateOptions& options, const EvaluationContext& context,
                      Fit& fit) {
  const auto try_plan = [&](int guest_slots, const Evaluation& e) {
    fit.tried.push_back({.guest_slots = guest_slots, .memory = e.step->memory_bytes_per_rank});
    if (fit.tried.back().memory <= fit.limit) fit.fewest_guest_slots = guest_slots;
  };
  try_plan(0, fit.now.evaluation);
  for (int slots = 1; !fit.fewest_guest_slots && slots <= request.most_guest_slots; ++slots) {
    if (slots == fit.planned.evaluation.plan.guest_slots) {
      try_plan(slots, fit.planned.evaluation);
      continue;
    }
    EvaluateOptions other = options;
    other.planner.guest_slots = slots;
    try_plan(slots, evaluate_valid(request.policy, request.workload, other, context));
  }
}

}  // namespace

Fit fit(const FitRequest& request, const EvaluateOptions& asked, const EvaluationContext& context) {
  assert(context.cost != nullptr);
  const CostModel& cost = *context.cost;
  const LoadTable& load = request.workload.load;
  if (num_assignments(load) == 0) throw InputError({.file = load.name}, "has no tokens");
  EvaluateOptions options = asked;
  options.choose = ChooseAmong::kGiven;  // the question is whether a plan fits, so it is made even if it does not pay
  Fit fit{.limit = options.memory_budget().value_or(cost.cluster().memory), .mean_tokens = mean_tokens_per_rank(load)};
  fit.now = fit_of(evaluate_vanilla(request.workload, options, context), load, cost, fit.limit);
  fit.planned = fit_of(evaluate_valid(request.policy, request.workload, options, context), load, cost, fit.limit);
  find_guest_slots(request, options, context, fit);
  fit.break_even = break_even(cost, load.topology());
  return fit;
}

}  // namespace foremoe
