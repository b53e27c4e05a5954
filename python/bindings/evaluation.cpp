// Compares policies, simulates steps, and exposes the details of one evaluation.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "evaluation.h"
#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/fit.h"
#include "foremoe/evaluate/layout_report.h"
#include "foremoe/evaluate/memory_remarks.h"
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

// Reads a model shape from a dict, which may also be the contents of a config.json.
ModelShape shape_of(const nb::dict& keys) {
  if (keys.contains("model_type")) {
    const auto text = nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(keys));
    return parse_model_config(text, "model");
  }
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

std::vector<Option> options_of(Cluster& cluster) {
  std::vector<Option> table;
  visit_keys(cluster, [&](std::string_view section, std::string_view key, auto& member, const KeyRange& range) {
    if (section.empty()) return;  // skips ranks_per_node, which the load determines
    const Option named{.name = fmt::format("{}.{}", section, key)};
    using Member = std::remove_reference_t<decltype(member)>;
    const IntegerRange whole{static_cast<std::int64_t>(range.least), static_cast<std::int64_t>(range.most)};
    if constexpr (std::is_same_v<Member, double>) {
      table.push_back(number_option(named, member, {.least = range.least, .most = range.most}));
    } else if constexpr (std::is_same_v<Member, Bytes>) {
      table.push_back(integer_option(named, member.value, whole));
    } else {
      table.push_back(integer_option(named, member, whole));
    }
  });
  return table;
}

// Sets the cluster from a dict: `like` names a cluster; other keys ("network.bytes_per_second") override its values.
void set_cluster(const nb::dict& keys, CostRequest& cost) {
  const auto fail = [](const std::string& key, const std::string& what) {
    throw InputError({.field = "cluster", .index = fmt::format("['{}']", key)}, what);
  };
  const nb::dict values = nb::cast<nb::dict>(keys.attr("copy")());
  if (!nb::try_cast(values.attr("pop")("like", nb::none()), cost.cluster)) fail("like", "expected a cluster's name");
  try {
    cost.changed = find_cluster(cost.cluster);
    set_options(options_of(*cost.changed), values);
  } catch (const InputError& error) {
    fail(cost.changed ? error.where().field : "like", error.problem());
  }
  if (cost.changed->ranks_per_switch > cost.changed->ranks_per_node) {
    fail("node.ranks_per_switch", fmt::format("more than the {} ranks of a node", cost.changed->ranks_per_node));
  }
}

std::optional<CostModel> cost_of(const CostRequest& request, const Workload& input, bool simulates) {
  NamedCost named = read_cost(request);
  named.options.ep_groups = input.num_groups_of_job();
  named.options.groups_share_node = input.groups_share_node();
  return simulates ? find_cost_model(named, input.load) : find_cost_model_if_asked(named, input.load);
}

}  // namespace

void set_options(const nb::dict& keywords, EvaluateOptions& evaluate, CostRequest& cost) {
  nb::dict rest;
  for (const auto& [key, value] : keywords) {
    if (nb::cast<std::string>(key) == "model" && nb::isinstance<nb::dict>(value)) {
      cost.shape = shape_of(nb::cast<nb::dict>(value));
    } else if (nb::cast<std::string>(key) == "cluster" && nb::isinstance<nb::dict>(value)) {
      set_cluster(nb::cast<nb::dict>(value), cost);
    } else {
      rest[key] = value;
    }
  }
  python::set_options(options_of(evaluate, cost), rest);
}

Plan Evaluated::plan_of(Phase phase) const {
  if (!evaluation->planned()) raise_skipped(*policy, evaluation->skipped);
  const StepPlan& plan = evaluation->plan_of(phase);
  const int layers = plan.num_layers();
  return {.step = std::shared_ptr<const StepPlan>(evaluation, &plan),
          .layers = {0, layers, layers},
          .times = evaluation->times};
}

namespace {

// `plan` and `load` are the evaluation's own, or their first micro-steps and layers.
SimulatedPhase simulate(const Evaluated& e, const StepPlan& plan, const LoadTable& load, SimulationOptions options) {
  options.path = e.options.path;
  options.depth = e.options.depth;
  options.online = e.policy->online();
  options.plans_ahead = e.policy->plans_ahead(e.input->for_policy(e.options.planner));
  const Array<double, 2> squared_lengths = e.input->squared_lengths();
  return simulate_phase({.load = load,
                         .plan = plan,
                         .cost = *e.cost,
                         .tokens = e.input->tokens_of_load(),
                         .fitted = e.input->fitted.get(),
                         .rows = e.options.rows,
                         .squared_lengths = squared_lengths},
                        options);
}

}  // namespace

void fill(Evaluated& e, const nb::dict& keywords, int threads,
          const std::function<Evaluation(const EvaluationContext&)>& evaluate) {
  CostRequest cost_request;
  set_options(keywords, e.options, cost_request);
  e.options.simulate = !e.phase;
  ThreadPool pool(threads_of(threads));
  run_interruptibly(pool, [&] {
    e.cost = cost_of(cost_request, *e.input, /*simulates=*/!cost_request.cluster.empty());
    e.evaluation = std::make_shared<const Evaluation>(evaluate({.pool = pool, .cost = e.cost ? &*e.cost : nullptr}));
    e.figures = to_json(*e.evaluation, /*checked=*/true);
    e.figures.erase("speedup_over_vanilla");
    e.figures.erase("rl_step_speedup");
    if (e.phase && e.cost && e.evaluation->check.ok()) {
      const SimulatedPhase alone =
          simulate(e, e.evaluation->plan, e.input->load, {.phase = *e.phase, .placement_stays = true, .pool = &pool});
      e.figures["dispatch"] = to_string(alone.dispatch);
      e.figures["dispatch_estimated"] = alone.dispatch_estimated;
      e.figures["rows"] = to_string(alone.rows);
      e.figures["attention"] = to_string(alone.attention);
      e.figures["phases"] = nlohmann::ordered_json::array({to_json(alone)});
    }
  });
}

namespace {

nb::any evaluations_of(const Load& load, const std::vector<std::string>& names, const nb::dict& keywords,
                       const nb::dict& own, const Former& former, std::optional<int> ep, int threads, bool simulates) {
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
  const std::vector<std::shared_ptr<const Workload>> groups = groups_of(load, former, ep);
  nlohmann::ordered_json figures;
  ThreadPool pool(threads_of(threads));
  run_interruptibly(pool, [&] {
    const std::optional<CostModel> cost = cost_of(cost_request, *groups.front(), simulates);
    const EvaluationContext context{.pool = pool, .cost = cost ? &*cost : nullptr};
    std::vector<std::vector<Evaluation>> evaluations(groups.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (simulates) {
        evaluations[g] = evaluate_all(policies, *groups[g], options, context);
      } else {
        for (const Policy* policy : policies) {
          evaluations[g].push_back(evaluate(*policy, *groups[g], options, context));
        }
      }
    }
    figures = to_json(over_groups(std::move(evaluations), ep.value_or(0)), /*checked=*/!simulates);
  });
  return to_python(figures);
}

nb::any fit_of(const Load& load, const std::string& name, const nb::dict& keywords, int most_guest_slots,
               const nb::dict& own, const Former& former, std::optional<int> ep, int threads) {
  if (most_guest_slots < 0) throw InputError({.field = "most_guest_slots"}, "is negative");
  EvaluateOptions options;
  CostRequest cost_request;
  set_options(keywords, options, cost_request);
  const std::shared_ptr<const Policy> policy = with_own_options({&policy_named(name)}, own).front();
  const std::vector<std::shared_ptr<const Workload>> groups = groups_of(load, former, ep);
  nlohmann::ordered_json json;
  ThreadPool pool(threads_of(threads));
  run_interruptibly(pool, [&] {
    const std::optional<CostModel> cost = cost_of(cost_request, *groups.front(), /*simulates=*/true);
    std::vector<Fit> fits;
    for (const auto& group : groups) {
      fits.push_back(fit({.policy = *policy, .workload = *group, .most_guest_slots = most_guest_slots}, options,
                         {.pool = pool, .cost = &*cost}));
    }
    json = to_json(over_groups(std::move(fits), ep.value_or(0)), options.memory_budget());
  });
  return to_python(json);
}

nb::any layout_of(const Load& load, std::optional<int> gpus, const nb::dict& keywords, int threads) {
  const Workload& whole = *load.input;
  if (gpus && *gpus != whole.load.num_ranks()) {
    throw InputError({.field = "gpus"}, fmt::format("{}, but the load has {}: collect the trace with ranks={}", *gpus,
                                                    counted(whole.load.num_ranks(), "rank"), *gpus));
  }
  EvaluateOptions options;
  CostRequest cost_request;
  set_options(keywords, options, cost_request);
  nlohmann::ordered_json json;
  ThreadPool pool(threads_of(threads));
  run_interruptibly(pool, [&] {
    const std::optional<CostModel> cost = cost_of(cost_request, whole, /*simulates=*/true);
    json = to_json(choose_layout(whole, options, {.pool = pool, .cost = &*cost}), whole, *cost);
  });
  return to_python(json);
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

// Returns the cluster and model parameters that affect the modelled times.
nb::object cost_facts(const Evaluated& e) {
  if (!e.cost) return nb::none();
  const CostModel& cost = *e.cost;
  nb::dict d;
  d["cluster"] = cost.cluster().name;
  d["model"] = cost.model().name;
  d["moe_layers"] = cost.model().moe_layers;
  d["sequence_tokens"] = cost.sequence_tokens();
  d["optimizer_shards"] = cost.optimizer_shards();
  d["dispatch"] = std::string(to_string(cost.options().dispatch));
  d["keep_activations"] = !cost.options().recompute_activations;
  d["recompute_experts"] = cost.options().recompute_experts;
  d["memory_bytes"] = cost.cluster().memory.value;
  const LinkSpeed& host = cost.cluster().host;
  d["fetch_seconds"] = host.latency_seconds + static_cast<double>(cost.expert_weights().value) / host.bytes_per_second;
  d["gather_seconds"] = e.policy->online().gathers_loads ? 0 : cost.gather_loads(e.input->load.topology());
  d["expert_gradient_bytes"] = cost.expert_gradient().value;
  d["expert_state_bytes"] = static_cast<double>(cost.expert_weights().value) +
                            static_cast<double>(cost.model().expert_parameters()) *
                                cost.options().optimizer_bytes_per_parameter / cost.optimizer_shards();
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
    const ReleasedGil release;
    const LoadTable part = take_first(load, micro_steps, layers);
    const StepPlan plan = take_first(e.evaluation->plan_of(Phase::kRecompute), part);
    ThreadPool pool(1);
    Timeline spans;
    (void)simulate(e, plan, part, {.phase = Phase::kRecompute, .pool = &pool, .timeline = &spans});
    json = spans.to_json();
  }
  return to_python(nlohmann::ordered_json::parse(json)["traceEvents"]);
}

nb::dict pairs_of(const Plan& plan, const Load& load, bool routed) {
  PairFigures f;
  {
    const StepPlan& step = finished(plan);
    const ReleasedGil release;
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

// Returns ExpertHeat's step and steady, each [layers, experts].
nb::tuple heat_of(const Load& load) {
  const ExpertHeat heat = expert_heat(load.table());
  const auto array = [](const Array<double, 2>& values) {
    return array_of(std::vector<double>(values.flat().begin(), values.flat().end()), values.shape());
  };
  return nb::make_tuple(array(heat.step), array(heat.steady));
}

// Returns remarks on the given memory needs, for the evaluation's cluster and memory budget.
std::vector<std::string> memory_remarks_of(const Evaluated& e,
                                           const std::vector<std::pair<std::string, std::int64_t>>& bytes_of) {
  if (!e.cost) throw InputError({.field = "evaluation"}, "has no simulated step");
  std::vector<NeededMemory> needed;
  for (const auto& [who, bytes] : bytes_of) needed.push_back({.who = who, .bytes = Bytes{bytes}});
  if (needed.empty()) return {};
  return memory_remarks(needed, *e.cost, e.options.memory_budget());
}

}  // namespace

void bind_evaluation(nb::module_& m) {
  nb::class_<Evaluated>(m, "Evaluation", "Evaluation of one policy's plan on a load. Created by foremoe.evaluate().")
      .def_prop_ro("policy", [](const Evaluated& e) { return e.evaluation->policy; })
      .def_prop_ro(
          "skipped",
          [](const Evaluated& e) -> std::optional<std::string> {
            if (e.evaluation->planned()) return std::nullopt;
            return e.evaluation->skipped;
          },
          "Reason why the policy has no plan; None if it has one, in which case the other properties are available.")
      .def_prop_ro(
          "figures", [](const Evaluated& e) { return to_python(e.figures); },
          nb::sig("def figures(self) -> dict[str, typing.Any]"),
          "Figures with the keys of `foremoe compare --json` and, with a cluster, of `foremoe simulate --json`, "
          "without "
          "speedups over other policies.")
      .def_prop_ro(
          "plan", [](const Evaluated& e) { return e.plan_of(Phase::kPolicyUpdate); }, nb::rv_policy::move,
          "Plan of the policy update.")
      .def_prop_ro(
          "recompute_plan", [](const Evaluated& e) { return e.plan_of(Phase::kRecompute); }, nb::rv_policy::move,
          "Plan of recompute; the same as `plan` unless more than one micro-step is in flight.")
      .def_prop_ro(
          "cost", &cost_facts, nb::sig("def cost(self) -> dict[str, typing.Any] | None"),
          "Parameters of the modelled cluster and model, or None: names, moe_layers, memory_bytes of a rank, "
          "fetch_seconds of one copy from the host, gather_seconds of all ranks' loads of a layer (0 if the system "
          "itself gathers them), expert_gradient_bytes, expert_state_bytes (weights and optimizer "
          "shard of one expert), bytes_per_second and latency_seconds of a "
          "rank's links to peers and network, and the options of the cost model.")
      .def("timeline", &timeline, "micro_steps"_a, "layers"_a,
           nb::sig("def timeline(self, micro_steps: int, layers: int) -> list[dict[str, typing.Any]]"),
           "Returns the modelled recompute of the first micro-steps and layers as events of a Chrome trace: pid is "
           "the rank, ts and dur are in µs.");
  m.def(
      "_evaluate",
      [](const Load& load, const std::string& policy, const nb::dict& options, const nb::dict& own,
         const nb::object& homes, const Plan* previous, const Load* previous_load, int threads) {
        return evaluated(load, policy, options, own, {homes, previous, previous_load}, threads);
      },
      "load"_a, "policy"_a, "options"_a, "policy_options"_a = nb::dict(), "homes"_a.none() = nb::none(),
      "previous"_a.none() = nb::none(), "previous_load"_a.none() = nb::none(), "threads"_a = 0);
  const auto evaluates = [&m](const char* name, bool simulates) {
    m.def(
        name,
        [simulates](const Load& load, const std::vector<std::string>& policies, const nb::dict& options,
                    const nb::dict& own, const nb::object& homes, const Plan* previous, const Load* previous_load,
                    std::optional<int> ep, int threads) {
          return evaluations_of(load, policies, options, own, {homes, previous, previous_load}, ep, threads, simulates);
        },
        "load"_a, "policies"_a, "options"_a, "policy_options"_a = nb::dict(), "homes"_a.none() = nb::none(),
        "previous"_a.none() = nb::none(), "previous_load"_a.none() = nb::none(), "ep"_a.none() = nb::none(),
        "threads"_a = 0);
  };
  evaluates("_compare", false);
  evaluates("_simulate", true);
  m.def(
      "_fit",
      [](const Load& load, const std::string& policy, const nb::dict& options, int most_guest_slots,
         const nb::dict& own, const nb::object& homes, const Plan* previous, const Load* previous_load,
         std::optional<int> ep, int threads) {
        return fit_of(load, policy, options, most_guest_slots, own, {homes, previous, previous_load}, ep, threads);
      },
      "load"_a, "policy"_a, "options"_a, "most_guest_slots"_a, "policy_options"_a = nb::dict(),
      "homes"_a.none() = nb::none(), "previous"_a.none() = nb::none(), "previous_load"_a.none() = nb::none(),
      "ep"_a.none() = nb::none(), "threads"_a = 0);

  m.def("_layout", &layout_of, "load"_a, "gpus"_a.none(), "options"_a, "threads"_a = 0);
  m.def("_pair_figures", &pairs_of, "plan"_a, "load"_a, "routed"_a);
  m.def("_expert_heat", &heat_of, "load"_a);
  m.def("_heat_bounds", [] { return std::vector<double>(kHeatBounds.begin(), kHeatBounds.end()); });
  m.def("_load_stability", &stability_of, "load"_a, "steps"_a);
  m.def("_memory_remarks", &memory_remarks_of, "evaluation"_a, "bytes_of"_a);
}

}  // namespace foremoe::python
