// What plans are worth: policies compared, steps simulated, one evaluation looked at closely.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "bindings.h"
#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/cost_request.h"
#include "foremoe/evaluate/evaluate_plan.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/memory_remarks.h"
#include "foremoe/evaluate/own_options.h"
#include "foremoe/evaluate/pair_figures.h"

namespace foremoe::python {
namespace {

std::vector<Option> options_of(EvaluateOptions& evaluate, CostRequest& cost) {
  std::vector<Option> table = planning_options_of(evaluate);
  for (std::vector<Option> more : {simulation_options_of(evaluate), options_of(cost)}) {
    for (Option& option : more) table.push_back(std::move(option));
  }
  table.push_back(
      integer_option({.name = "align", .value = "N", .help = "See foremoe.figures"}, evaluate.align, {1, 1 << 20}));
  return table;
}

// A model may be its shape, as a dict.
ModelShape shape_of(const nb::dict& keys) {
  ModelShape shape;
  try {
    set_options(options_of(shape), keys);
  } catch (const InputError& error) {
    throw InputError({.field = "model", .index = fmt::format("['{}']", error.where().field)}, error.problem());
  }
  for (const auto& [name, value] : {std::pair{"moe_layers", shape.moe_layers}, {"hidden", shape.hidden}}) {
    if (value == 0) throw InputError({.field = "model"}, fmt::format("{} is missing", name));
  }
  AttentionShape& attention = shape.attention;
  if (attention.kv_heads == 0) attention.kv_heads = attention.heads;
  attention.value_width = attention.key_width;
  return shape;
}

void set_options(const nb::dict& keywords, EvaluateOptions& evaluate, CostRequest& cost) {
  nb::dict rest;
  for (const auto& [key, value] : keywords) {
    if (nb::cast<std::string>(key) == "model" && nb::isinstance<nb::dict>(value)) {
      cost.shape = shape_of(nb::cast<nb::dict>(value));
    } else {
      rest[key] = value;
    }
  }
  python::set_options(options_of(evaluate, cost), rest);
}

std::optional<CostModel> cost_of(const CostRequest& request, const LoadTable& load, bool simulates) {
  if (simulates) return find_cost_model(request, load);
  return find_cost_model_if_asked(request, load);
}

nb::any evaluations_of(const Load& load, const std::vector<std::string>& names, const nb::dict& keywords,
                       const nb::dict& own, const Former& former, int threads, bool simulates) {
  EvaluateOptions options{.simulate = simulates};
  CostRequest cost_request;
  set_options(keywords, options, cost_request);
  const std::vector<const Policy*> named = [&] {
    try {
      return policies_named(names);
    } catch (const InputError& error) {
      throw InputError({.field = "policies"}, error.problem());
    }
  }();
  const std::vector<std::shared_ptr<const Policy>> owned = with_own_options(named, own);
  std::vector<const Policy*> policies;
  for (const auto& policy : owned) policies.push_back(policy.get());
  const std::shared_ptr<const StepInput> input = input_of(load, former);
  std::string json;
  ThreadPool pool(threads_of(threads));
  run_interruptibly(pool, [&] {
    const std::optional<CostModel> cost = cost_of(cost_request, input->load, simulates);
    const EvaluationContext context{.pool = pool, .cost = cost ? &*cost : nullptr};
    std::vector<Evaluation> evaluations;
    if (simulates) {
      evaluations = evaluate_all(policies, *input, options, context);
    } else {
      for (const Policy* policy : policies) evaluations.push_back(evaluate(*policy, *input, options, context));
    }
    nlohmann::ordered_json array = nlohmann::ordered_json::array();
    for (const Evaluation& e : evaluations) array.push_back(to_json(e, /*checked=*/!simulates));
    json = array.dump();
  });
  return parse_json(json);
}

// One policy's evaluation, with what it rests on.
struct Evaluated {
  std::shared_ptr<const Policy> policy;
  std::shared_ptr<const StepInput> input;
  EvaluateOptions options;
  std::optional<CostModel> cost;
  std::shared_ptr<const Evaluation> evaluation;
  std::string figures;  // JSON, without what compares with other policies

  Plan plan_of(Phase phase) const {
    if (!evaluation->planned()) raise_skipped(*policy, evaluation->skipped);
    const StepPlan& plan = evaluation->plan_of(phase);
    const int layers = plan.num_layers();
    return {.step = std::shared_ptr<const StepPlan>(evaluation, &plan),
            .layers = {0, layers, layers},
            .times = evaluation->times};
  }
};

// `evaluate`: of an Evaluated whose evaluation and figures are not there yet.
void fill(Evaluated& e, const nb::dict& keywords, int threads,
          const std::function<Evaluation(const EvaluationContext&)>& evaluate) {
  CostRequest cost_request;
  set_options(keywords, e.options, cost_request);
  ThreadPool pool(threads_of(threads));
  run_interruptibly(pool, [&] {
    e.cost = cost_of(cost_request, e.input->load, /*simulates=*/!cost_request.cluster.empty());
    e.evaluation = std::make_shared<const Evaluation>(evaluate({.pool = pool, .cost = e.cost ? &*e.cost : nullptr}));
    nlohmann::ordered_json json = to_json(*e.evaluation, /*checked=*/true);
    json.erase("speedup_over_vanilla");
    json.erase("rl_step_speedup");
    e.figures = json.dump();
  });
}

Evaluated evaluated(const Load& load, const std::string& name, const nb::dict& keywords, const nb::dict& own,
                    const Former& former, int threads) {
  Evaluated e;
  e.policy = with_own_options({&policy_named(name)}, own).front();
  e.input = input_of(load, former);
  fill(e, keywords, threads,
       [&](const EvaluationContext& context) { return evaluate(*e.policy, *e.input, e.options, context); });
  return e;
}

// A plan with other quotas, on the load that they serve.
Evaluated evaluated_quotas(const Plan& plan, const AnyArray& slot_tokens, const Load& load, const nb::dict& keywords,
                           const nb::dict& own, int threads) {
  const StepPlan& step = finished(plan);
  const auto* const tokens = data_of<std::int64_t>(slot_tokens, "slot_tokens", "events, layers, ranks, slots", 4);
  Array<Tokens, 4> quotas({slot_tokens.shape(0), slot_tokens.shape(1), slot_tokens.shape(2), slot_tokens.shape(3)});
  for (std::size_t i = 0; i < quotas.flat().size(); ++i) quotas.flat()[i] = Tokens{tokens[i]};
  Evaluated e;
  e.policy = with_own_options({&policy_named(step.policy)}, own).front();
  e.input = load.input;
  fill(e, keywords, threads, [&](const EvaluationContext& context) {
    Evaluation made =
        evaluate_plan(*e.policy, {with_quotas(step, std::move(quotas), load.table())}, *e.input, e.options, context);
    made.times = plan.times;
    return made;
  });
  return e;
}

// A plan that is there, and recompute's or null.
Evaluated evaluated_plan(const Plan& plan, const Load& load, const nb::dict& keywords, const nb::dict& own,
                         const Plan* recompute_plan, const nb::object& homes, int threads) {
  const auto whole = [](const Plan& one, const char* argument) -> const StepPlan& {
    if (!one.layers.is_all()) throw InputError({.field = argument}, "is a part of a plan: join the parts before");
    return finished(one);
  };
  PlansOfStep plans{.policy_update = whole(plan, "plan")};
  if (recompute_plan != nullptr) plans.recompute = whole(*recompute_plan, "recompute_plan");
  Evaluated e;
  e.policy = with_own_options({&policy_named(plans.policy_update.policy)}, own).front();
  e.input = input_of(load, {homes, nullptr, nullptr});
  fill(e, keywords, threads, [&](const EvaluationContext& context) {
    Evaluation made = evaluate_plan(*e.policy, std::move(plans), *e.input, e.options, context);
    made.times = plan.times;
    return made;
  });
  return e;
}

// What of the modelled cluster and model a reader of figures needs to know.
nb::object cost_facts(const Evaluated& e) {
  if (!e.cost) return nb::none();
  const CostModel& cost = *e.cost;
  nb::dict d;
  d["cluster"] = cost.cluster().name;
  d["model"] = cost.model().name;
  d["moe_layers"] = cost.model().moe_layers;
  d["sequence_tokens"] = cost.options().sequence_tokens;
  d["optimizer_shards"] = cost.options().optimizer_shards;
  d["keep_activations"] = !cost.options().recompute_activations;
  d["memory_bytes"] = cost.cluster().memory.value;
  const LinkSpeed& host = cost.cluster().host;
  d["fetch_seconds"] = host.latency_seconds + static_cast<double>(cost.expert_weights().value) / host.bytes_per_second;
  d["expert_gradient_bytes"] = cost.expert_gradient().value;
  d["expert_state_bytes"] = static_cast<double>(cost.expert_weights().value) +
                            static_cast<double>(cost.model().expert_parameters()) *
                                cost.options().optimizer_bytes_per_parameter / cost.options().optimizer_shards;
  for (const auto& [name, link] : {std::pair{"peers", cost.cluster().peers}, {"network", cost.cluster().network}}) {
    nb::dict speed;
    speed["bytes_per_second"] = link.bytes_per_second;
    speed["latency_seconds"] = link.latency_seconds;
    d[name] = speed;
  }
  return d;
}

nb::any timeline(const Evaluated& e, int micro_steps, int layers) {
  const LoadTable& load = e.input->load;
  if (!e.cost || !e.evaluation->step) throw InputError({.field = "evaluation"}, "has no simulated step");
  const auto expect = [](const char* field, int value, int most) {
    if (value < 1 || value > most) throw InputError({.field = field}, fmt::format("{}, expected 1 … {}", value, most));
  };
  expect("micro_steps", micro_steps, load.num_micro_steps());
  expect("layers", layers, load.num_layers());
  std::string json;
  {
    const nb::gil_scoped_release release;
    const LoadTable part = take_first(load, micro_steps, layers);
    const StepPlan plan = take_first(e.evaluation->plan_of(Phase::kRecompute), part);
    ThreadPool pool(1);
    Timeline spans;
    (void)simulate_phase({.load = part,
                          .plan = plan,
                          .cost = *e.cost,
                          .trace = e.input->trace_or_null(),
                          .batching = e.input->batching_or_null()},
                         {.phase = Phase::kRecompute,
                          .path = e.options.path,
                          .depth = e.options.depth,
                          .online = e.policy->online(),
                          .pool = &pool,
                          .timeline = &spans});
    json = spans.to_json();
  }
  return nb::cast<nb::any>(parse_json(json)["traceEvents"]);
}

nb::dict pairs_of(const Plan& plan, const Load& load, bool routed) {
  PairFigures f;
  {
    const StepPlan& step = finished(plan);
    const nb::gil_scoped_release release;
    f = pair_figures(step, load.table(), routed);
  }
  nb::dict d;
  d["share_of_bucket"] = std::vector<double>(f.share_of_bucket.begin(), f.share_of_bucket.end());
  d["straggler"] = f.straggler;
  d["waste"] = f.waste;
  d["copies_after_first_event"] = f.copies_after_first_event;
  d["busiest_receiver"] = f.busiest_receiver;
  if (!routed) return d;
  d["sent_without_locality"] = f.sent_without_locality;
  d["sent_with_rank_locality"] = f.sent_with_rank_locality;
  d["sent_with_node_locality"] = f.sent_with_node_locality;
  d["between_nodes"] = f.between_nodes;
  return d;
}

nb::dict stability_of(const Load& load, int steps) {
  const int micro_steps = load.table().num_micro_steps();
  if (steps < 1 || micro_steps % steps != 0) {
    throw InputError({.field = "steps"}, fmt::format("{} does not divide {} micro-steps", steps, micro_steps));
  }
  const LoadStability s = load_stability(load.table(), steps);
  nb::dict d;
  d["hottest"] = s.hottest;
  d["step_change"] = s.step_change;
  d["micro_step_change"] = s.micro_step_change;
  return d;
}

// On the cluster, and within the budget, of one evaluation.
std::vector<std::string> memory_remarks_of(const Evaluated& e,
                                           const std::vector<std::pair<std::string, std::int64_t>>& bytes_of) {
  if (!e.cost) throw InputError({.field = "evaluation"}, "has no simulated step");
  std::vector<NeededMemory> needed;
  for (const auto& [who, bytes] : bytes_of) needed.push_back({.who = who, .bytes = Bytes{bytes}});
  if (needed.empty()) return {};
  return memory_remarks(needed, *e.cost, e.options.memory_budget());
}

// What evaluate() finds of its keywords before it has a load: whether each can be, and the model's sizes.
nb::object check_evaluation(const nb::dict& keywords) {
  EvaluateOptions options;
  CostRequest cost;
  set_options(keywords, options, cost);
  try {
    if (!cost.cluster.empty()) (void)find_cluster(cost.cluster);
  } catch (const InputError& error) {
    throw InputError({.field = "cluster"}, error.what());
  }
  if (!cost.shape && cost.model.empty()) return nb::none();
  const ModelShape model = cost.shape ? *cost.shape : model_named(cost.model);
  nb::dict d;
  d["name"] = model.name;
  d["moe_layers"] = model.moe_layers;
  d["experts"] = model.experts;
  d["top_k"] = model.top_k;
  return d;
}

// Remarks on the options of these names, which were given and do nothing: for this load, by these policies, without a
// cluster; and on the former plan.
std::vector<std::string> unused_options(const Load& load, const std::vector<std::string>& names,
                                        const nb::dict& keywords, const std::set<std::string, std::less<>>& given,
                                        const Plan* previous) {
  EvaluateOptions evaluate;
  CostRequest cost;
  set_options(keywords, evaluate, cost);
  PolicyInput asked = load.input->for_policy(evaluate.planner);
  if (previous != nullptr) asked.previous = whole_plan_of(previous);
  std::vector<std::string> remarks = remarks_on_unused(*load.input, policies_named(names), asked, given);
  if (!cost.cluster.empty()) return remarks;
  for (const std::vector<Option>& table : {simulation_options_of(evaluate), options_of(cost)}) {
    for (const Option& option : table) {
      if (given.contains(option.name))
        remarks.push_back(fmt::format("`{}` has no effect without a cluster", option.name));
    }
  }
  return remarks;
}

}  // namespace

void bind_evaluation(nb::module_& m) {
  nb::class_<Evaluated>(m, "Evaluation", "What one policy's plan is worth on a load; foremoe.evaluate() makes it.")
      .def_prop_ro("policy", [](const Evaluated& e) { return e.evaluation->policy; })
      .def_prop_ro(
          "skipped",
          [](const Evaluated& e) -> std::optional<std::string> {
            if (e.evaluation->planned()) return std::nullopt;
            return e.evaluation->skipped;
          },
          "Why there is no plan; None, and all below holds.")
      .def_prop_ro(
          "figures", [](const Evaluated& e) { return parse_json(e.figures); },
          nb::sig("def figures(self) -> dict[str, typing.Any]"),
          "The keys of `foremoe compare --json` and, with a cluster, of `foremoe simulate --json`, without "
          "speedups over other policies.")
      .def_prop_ro(
          "plan", [](const Evaluated& e) { return e.plan_of(Phase::kPolicyUpdate); }, nb::rv_policy::move,
          "Of the policy update.")
      .def_prop_ro(
          "recompute_plan", [](const Evaluated& e) { return e.plan_of(Phase::kRecompute); }, nb::rv_policy::move,
          "Of recompute; the same unless more than one micro-step is in flight.")
      .def_prop_ro(
          "cost", &cost_facts, nb::sig("def cost(self) -> dict[str, typing.Any] | None"),
          "Of the modelled cluster and model, None without: names, moe_layers, memory_bytes of a rank, "
          "fetch_seconds of one copy from the host, expert_gradient_bytes, expert_state_bytes (weights and optimizer "
          "shard of one), bytes_per_second and latency_seconds of a "
          "rank's links to peers and network, and the options of cost.")
      .def("timeline", &timeline, "micro_steps"_a, "layers"_a,
           nb::sig("def timeline(self, micro_steps: int, layers: int) -> list[dict[str, typing.Any]]"),
           "Spans of the modelled recompute of the first micro-steps and layers, as events of a Chrome trace: pid is "
           "the rank, ts and dur are in µs.");
  m.def(
      "_evaluate",
      [](const Load& load, const std::string& policy, const nb::dict& options, const nb::dict& own,
         const nb::object& homes, const Plan* previous, const Load* previous_load, int threads) {
        return evaluated(load, policy, options, own, {homes, previous, previous_load}, threads);
      },
      "load"_a, "policy"_a, "options"_a, "own"_a = nb::dict(), "homes"_a.none() = nb::none(),
      "previous"_a.none() = nb::none(), "previous_load"_a.none() = nb::none(), "threads"_a = 0);
  m.def("_evaluate_plan", &evaluated_plan, "plan"_a, "load"_a, "options"_a, "own"_a, "recompute_plan"_a.none(),
        "homes"_a.none(), "threads"_a);
  m.def("_evaluate_quotas", &evaluated_quotas, "plan"_a, "slot_tokens"_a, "load"_a, "options"_a, "own"_a = nb::dict(),
        "threads"_a = 0);

  const auto evaluates = [&m](const char* name, bool simulates) {
    m.def(
        name,
        [simulates](const Load& load, const std::vector<std::string>& policies, const nb::dict& options,
                    const nb::dict& own, const nb::object& homes, const Plan* previous, const Load* previous_load,
                    int threads) {
          return evaluations_of(load, policies, options, own, {homes, previous, previous_load}, threads, simulates);
        },
        "load"_a, "policies"_a, "options"_a, "own"_a, "homes"_a.none(), "previous"_a.none(), "previous_load"_a.none(),
        "threads"_a);
  };
  evaluates("_compare", false);
  evaluates("_simulate", true);

  m.def("_pair_figures", &pairs_of, "plan"_a, "load"_a, "routed"_a);
  m.def("_load_stability", &stability_of, "load"_a, "steps"_a);
  m.def("_memory_remarks", &memory_remarks_of, "evaluation"_a, "bytes_of"_a);
  m.def("_unused_options", &unused_options, "load"_a, "policies"_a, "options"_a, "given"_a,
        "previous"_a.none() = nb::none());
  m.def("_policies_named", [](const std::vector<std::string>& names) {
    std::vector<std::string> all;
    for (const Policy* policy : policies_named(names)) all.emplace_back(policy->name());
    return all;
  });
  m.def("_policy_uses", [](const std::string& policy) {
    const std::span<const std::string_view> uses = policy_named(policy).uses();
    return std::vector<std::string>(uses.begin(), uses.end());
  });
  m.def("_ranks_per_node", [](const std::string& cluster) { return find_cluster(cluster).ranks_per_node; });
  m.def(
      "_own_options",
      [](const std::string& policy, const nb::dict& own) {
        (void)with_own_options({&policy_named(policy)}, own);  // throws where one of them cannot be
        std::vector<std::string> names;
        for (const Option& option : policy_with_options(policy).options) names.push_back(option.name);
        return names;
      },
      "policy"_a, "own"_a = nb::dict());
  m.def(
      "policies",
      [] {
        nb::dict names;
        for (const Policy* policy : all_policies()) {
          names[nb::cast(std::string(policy->name()))] = std::string(policy->summary());
        }
        return names;
      },
      nb::sig("def policies() -> dict[str, str]"), "Every policy by name, with what it does in one line.");
  m.def("clusters", &cluster_names, "Names of the clusters that simulate() knows.");
  m.def("models", &model_names, "Names of the models that simulate() knows.");
  m.def("_check_evaluation", &check_evaluation, "options"_a,
        nb::sig("def _check_evaluation(options: dict[str, typing.Any]) -> dict[str, typing.Any] | None"));
}

}  // namespace foremoe::python
