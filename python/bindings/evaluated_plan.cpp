// Evaluates existing plans on a load, with their own quotas or with given quotas, and parts of plans.

#include <fmt/format.h>

#include <utility>

#include "evaluation.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate_plan.h"

namespace foremoe::python {
namespace {

// Evaluates a plan with other quotas, on the load that they serve.
Evaluated evaluated_quotas(const Plan& plan, const AnyArray& slot_tokens, const Load& load, const nb::dict& keywords,
                           const nb::dict& own, const Load* previous_load, int threads) {
  const StepPlan& step = finished(plan);
  const auto* const tokens = data_of<std::int64_t>(slot_tokens, "slot_tokens", "events, layers, ranks, slots", 4);
  Array<Tokens, 4> quotas({slot_tokens.shape(0), slot_tokens.shape(1), slot_tokens.shape(2), slot_tokens.shape(3)});
  for (std::size_t i = 0; i < quotas.flat().size(); ++i) quotas.flat()[i] = Tokens{tokens[i]};
  Evaluated e;
  e.policy = with_own_options({&policy_named(step.policy)}, own).front();
  e.input = input_of(load, {nb::none(), nullptr, previous_load});
  fill(e, keywords, threads, [&](const EvaluationContext& context) {
    Evaluation made =
        evaluate_plan(*e.policy, {with_quotas(step, std::move(quotas), load.table())}, *e.input, e.options, context);
    made.times = plan.times;
    return made;
  });
  return e;
}

// Evaluates a plan, optionally with a separate plan of recompute, or simulates a single phase of a plan.
Evaluated evaluated_plan(const Plan& plan, const Load& load, const nb::dict& keywords, const nb::dict& own,
                         const Plan* recompute_plan, const std::optional<std::string>& phase, const nb::object& homes,
                         const Load* previous_load, int threads) {
  const auto whole = [](const Plan& one, const char* argument) -> const StepPlan& {
    if (!one.layers.is_all()) throw InputError({.field = argument}, "is a part of a plan: join the parts first");
    return finished(one);
  };
  PlansOfStep plans{.policy_update = whole(plan, "plan")};
  if (recompute_plan != nullptr) plans.recompute = whole(*recompute_plan, "recompute_plan");
  Evaluated e;
  if (phase) e.phase = phase_named(*phase);
  if (phase && recompute_plan != nullptr) {
    throw InputError({.field = "recompute_plan"},
                     fmt::format("cannot be combined with `phase`: only {} of `plan` is simulated", *phase));
  }
  e.policy = with_own_options({&policy_named(plans.policy_update.policy)}, own).front();
  e.input = input_of(load, {homes, nullptr, previous_load});
  fill(e, keywords, threads, [&](const EvaluationContext& context) {
    Evaluation made = evaluate_plan(*e.policy, std::move(plans), *e.input, e.options, context);
    made.times = plan.times;
    return made;
  });
  return e;
}

// Simulates one phase of a plan without checking it. For a part of a plan, returns its layers' share of the seconds.
double phase_seconds(const Plan& plan, const Load& load, const nb::dict& keywords, const std::string& phase,
                     int threads) {
  const StepPlan& step = finished(plan);
  EvaluateOptions options;
  CostRequest request;
  set_options(keywords, options, request);
  const Policy& policy = policy_named(step.policy);
  const SimulationOptions simulation{.phase = phase_named(phase),
                                     .path = options.path,
                                     .depth = options.depth,
                                     .online = policy.online(),
                                     .placement_stays = true,
                                     .plans_ahead = policy.plans_ahead(load.input->for_policy(options.planner))};
  ThreadPool pool(threads_of(threads));
  double seconds = 0;
  run_interruptibly(pool, [&] {
    const CostModel cost = find_cost_model(read_cost(request), load.table());
    const LoadTable part = take_layers(load.table(), plan.layers);
    seconds = simulate_phase({.load = part, .plan = step, .cost = cost}, simulation).seconds;
  });
  return seconds * (plan.layers.last - plan.layers.first) / plan.layers.whole;
}

}  // namespace

void bind_evaluated_plan(nb::module_& m) {
  m.def("_evaluate_plan", &evaluated_plan, "plan"_a, "load"_a, "options"_a, "policy_options"_a = nb::dict(),
        "recompute_plan"_a.none() = nb::none(), "phase"_a.none() = nb::none(), "homes"_a.none() = nb::none(),
        "previous_load"_a.none() = nb::none(), "threads"_a = 0);
  m.def("_evaluate_quotas", &evaluated_quotas, "plan"_a, "slot_tokens"_a, "load"_a, "options"_a,
        "policy_options"_a = nb::dict(), "previous_load"_a.none() = nb::none(), "threads"_a = 0);
  m.def("_phase_seconds", &phase_seconds, "plan"_a, "load"_a, "options"_a, "phase"_a, "threads"_a = 1);
  m.def("_estimated_planning_seconds", [](const Plan& plan, const Load& load) {
    return estimated_planning_seconds(load.table(), finished(plan).residency, false);
  });
}

}  // namespace foremoe::python
