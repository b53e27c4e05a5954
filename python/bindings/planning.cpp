// Planning with any policy, in one call or in the background, and comparing and simulating policies.

#include <fmt/format.h>

#include <atomic>

#include <nlohmann/json.hpp>

#include "bindings.h"
#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/cost_request.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/running_plan.h"
#include "foremoe/rollout/importers/importer.h"

namespace foremoe::python {
namespace {

// The planner's own options: no cluster is at hand, so nothing that needs one.
PlannerOptions planner_options_of(const nb::dict& keywords) {
  PlannerOptions options;
  set_options(options_of(options), keywords);
  return options;
}

LayerRange layers_of(const nb::object& layers, const LoadTable& load, const Policy& policy) {
  const int whole = load.num_layers();
  if (layers.is_none()) return {0, whole, whole};
  const auto fail = [&](const std::string& what) { throw InputError({.field = "layers"}, what); };
  if (!nb::hasattr(layers, "start") || !nb::hasattr(layers, "stop") || !nb::hasattr(layers, "step")) {
    fail("expected None or a range of layers");
  }
  const auto bound = [&](const char* name, int otherwise) {
    const nb::object value = layers.attr(name);
    int number = otherwise;
    if (!value.is_none() && !nb::try_cast(value, number)) fail(fmt::format("its {} is no number of a layer", name));
    return number;
  };
  const LayerRange range{bound("start", 0), bound("stop", whole), whole};
  if (bound("step", 1) != 1) fail("must follow one another: step 1");
  if (range.first < 0 || range.first >= range.last || range.last > whole) {
    fail(fmt::format("{} to {} is not within the {} layers of the load", range.first, range.last - 1, whole));
  }
  if (!range.is_all() && policy.name() != "foremoe" && policy.name() != "static" && policy.name() != "vanilla") {
    fail(fmt::format("policy {} plans all layers at once", policy.name()));
  }
  return range;
}

LoadTable take_layers(const LoadTable& load, const LayerRange& range) {
  auto shape = load.load.shape();
  shape[1] = static_cast<std::size_t>(range.last - range.first);
  LoadTable part{
      .load = Array<Tokens, 4>(shape), .top_k = load.top_k, .ranks_per_node = load.ranks_per_node, .name = load.name};
  const std::size_t of_layer = shape[2] * shape[3];
  for (std::size_t m = 0; m < shape[0]; ++m) {
    const auto from =
        load.load[m].flat().subspan(static_cast<std::size_t>(range.first) * of_layer, shape[1] * of_layer);
    std::ranges::copy(from, part.load[m].data());
  }
  return part;
}

const StepPlan* whole_plan_of(const Plan* plan) {
  if (plan == nullptr) return nullptr;
  if (!plan->layers.is_all()) throw InputError({.field = "previous"}, "is a part of a plan: join the parts before");
  return &finished(*plan);
}

[[noreturn]] void raise_skipped(const Policy& policy, const std::string& reason) {
  const nb::object type = nb::module_::import_("foremoe._errors").attr("PolicySkipped");
  const nb::object error = type(std::string(policy.name()), reason);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

// Who plans, by which options, from what beside the load.
struct Request {
  std::string policy;
  const nb::dict& options;
  const nb::object& homes;
  const Plan* previous;
  const Load* previous_load;
  int threads;
};

Plan plan(const Load& load, const Request& with, const nb::object& layers,
          const std::optional<nb::callable>& on_micro_step) {
  const Policy& policy = policy_named(with.policy);
  const LayerRange range = layers_of(layers, load.table(), policy);
  const Array<RankId, 2> homes = homes_of(with.homes, load.table());
  std::optional<LoadTable> part;
  if (!range.is_all()) {
    if (with.previous != nullptr) throw InputError({.field = "previous"}, "cannot be used beside layers");
    part = take_layers(load.table(), range);
  }
  const auto experts = static_cast<std::size_t>(load.table().num_experts());
  PolicyInput input{.load = part ? *part : load.table(),
                    .home = {homes.flat().data() + static_cast<std::size_t>(range.first) * experts,
                             {static_cast<std::size_t>(range.last - range.first), experts}},
                    .options = planner_options_of(with.options),
                    .previous = whole_plan_of(with.previous),
                    .previous_load = with.previous_load == nullptr ? nullptr : &with.previous_load->table()};
  int announced = 0;
  if (on_micro_step) {
    input.on_micro_step = [&](const StepPlan&, MicroStepId m) {
      const nb::gil_scoped_acquire gil;
      announced = m.value + 1;
      (*on_micro_step)(m.value);
    };
  }
  ThreadPool pool(threads_of(with.threads));
  std::optional<PolicyResult> result;
  run_interruptibly(pool, [&] { result = policy.plan(input, pool); });
  if (const auto* skipped = std::get_if<Skipped>(&*result)) raise_skipped(policy, skipped->reason);
  PlannedStep planned = std::get<PlannedStep>(std::move(*result));
  // Policies that plan all micro-steps at once announce none.
  for (; on_micro_step && announced < planned.plan.num_micro_steps(); ++announced) (*on_micro_step)(announced);
  if (part) planned.plan.load_digest = load_digest(load.table());
  return {.step = std::make_shared<const StepPlan>(std::move(planned.plan)), .layers = range, .times = planned.times};
}

}  // namespace

// A plan in the making. What it refers to lives as long as it.
class BackgroundPlan {
 public:
  BackgroundPlan(const Load& load, const Request& with)
      : policy_(policy_named(with.policy)), pool_(threads_of(with.threads)), input_(*load.input) {
    input_.homes = homes_of(with.homes, load.table());
    if (const StepPlan* previous = whole_plan_of(with.previous)) input_.previous = *previous;
    if (with.previous_load != nullptr) input_.previous_load = with.previous_load->table();
    running_.emplace(
        RunningPlan::Request{.policy = policy_, .input = input_, .options = planner_options_of(with.options)}, pool_);
  }
  ~BackgroundPlan() {
    pool_.cancel();
    const nb::gil_scoped_release release;  // what runs may take a while to see it
    running_.reset();
  }
  BackgroundPlan(const BackgroundPlan&) = delete;
  BackgroundPlan& operator=(const BackgroundPlan&) = delete;

  // Ctrl-C ends these waits, and planning with them.
  void begin() {
    std::optional<std::string> skipped;
    run_interruptibly(pool_, [&] { skipped = running_->wait_to_begin(); });
    if (skipped) raise_skipped(policy_, *skipped);
  }
  const StepPlan& step() const { return running_->plan(); }
  int num_micro_steps() const { return input_.load.num_micro_steps(); }
  int num_planned() const { return planned_; }
  void wait_for(int micro_step) {
    const int most = num_micro_steps();
    if (micro_step < 0 || micro_step >= most) {
      throw InputError({.field = "micro_step"}, fmt::format("{} is none of 0 … {}", micro_step, most - 1));
    }
    begin();
    run_interruptibly(pool_, [&] { running_->wait_for(MicroStepId{micro_step}); });
    planned_ = std::max(planned_.load(), micro_step + 1);
  }

 private:
  const Policy& policy_;
  ThreadPool pool_;
  StepInput input_;
  std::atomic<int> planned_ = 0;        // micro-steps that were waited for
  std::optional<RunningPlan> running_;  // last: its thread uses the others
};

namespace {

Plan begun(const std::shared_ptr<BackgroundPlan>& running) {
  running->begin();
  const int layers = running->step().num_layers();
  return {.step = std::shared_ptr<const StepPlan>(running, &running->step()),
          .layers = {0, layers, layers},
          .running = running};
}

nb::any evaluations_of(const Load& load, const std::vector<std::string>& names, const Request& with, bool simulates) {
  EvaluateOptions options{.simulate = simulates};
  CostRequest cost_request;
  std::vector<Option> table = planning_options_of(options);
  for (std::vector<Option> more : {simulation_options_of(options), options_of(cost_request)}) {
    for (Option& option : more) table.push_back(std::move(option));
  }
  table.push_back(
      integer_option({.name = "align", .value = "N", .help = "See foremoe.figures"}, options.align, {1, 1 << 20}));
  set_options(std::move(table), with.options);
  const std::vector<const Policy*> policies = [&] {
    try {
      return policies_named(names);
    } catch (const InputError& error) {
      throw InputError({.field = "policies"}, error.problem());
    }
  }();
  StepInput input = *load.input;
  input.homes = homes_of(with.homes, load.table());
  if (const StepPlan* previous = whole_plan_of(with.previous)) input.previous = *previous;
  if (with.previous_load != nullptr) input.previous_load = with.previous_load->table();

  std::string json;
  ThreadPool pool(threads_of(with.threads));
  run_interruptibly(pool, [&] {
    const std::optional<CostModel> cost =
        simulates ? find_cost_model(cost_request, input.load) : find_cost_model_if_asked(cost_request, input.load);
    const EvaluationContext context{.pool = pool, .cost = cost ? &*cost : nullptr};
    std::vector<Evaluation> evaluations;
    if (simulates) {
      evaluations = evaluate_all(policies, input, options, context);
    } else {
      for (const Policy* policy : policies) evaluations.push_back(evaluate(*policy, input, options, context));
    }
    nlohmann::ordered_json array = nlohmann::ordered_json::array();
    for (const Evaluation& e : evaluations) array.push_back(to_json(e, /*checked=*/!simulates));
    json = array.dump();
  });
  return parse_json(json);
}

// {name, type, range, words, default, help} of each option, by table: what the keywords of Python are made from.
nb::dict option_tables() {
  PlannerOptions planner;
  EvaluateOptions evaluate;
  CostRequest cost;
  InputOptions input;
  ImportOptions import;
  const std::vector<std::pair<const char*, std::vector<Option>>> tables{{"planner", options_of(planner)},
                                                                        {"planning", planning_options_of(evaluate)},
                                                                        {"simulation", simulation_options_of(evaluate)},
                                                                        {"cost", options_of(cost)},
                                                                        {"input", options_of(input)},
                                                                        {"import", options_of(import)}};
  nb::dict result;
  for (const auto& [name, table] : tables) {
    nb::list list;
    for (const Option& option : table) {
      nb::dict d;
      d["name"] = option.name;
      d["type"] = option.type;
      d["range"] = option.range;
      d["words"] = option.words;
      d["default"] = option.initial;
      d["help"] = option.help;
      list.append(d);
    }
    result[name] = list;
  }
  return result;
}

}  // namespace

const StepPlan& finished(const Plan& plan) {
  if (plan.running && plan.running->num_micro_steps() > 0) plan.running->wait_for(plan.running->num_micro_steps() - 1);
  return *plan.step;
}

int num_planned(const Plan& plan) { return plan.running ? plan.running->num_planned() : plan.step->num_micro_steps(); }

void bind_planning(nb::module_& m) {
  m.def(
      "_plan",
      [](const Load& load, const std::string& policy, const nb::dict& options, const nb::object& homes,
         const Plan* previous, const Load* previous_load, const nb::object& layers, int threads,
         const std::optional<nb::callable>& on_micro_step) {
        return plan(load, {policy, options, homes, previous, previous_load, threads}, layers, on_micro_step);
      },
      "load"_a, "policy"_a, "options"_a, "homes"_a.none(), "previous"_a.none(), "previous_load"_a.none(),
      "layers"_a.none(), "threads"_a, "on_micro_step"_a.none());

  nb::class_<BackgroundPlan>(m, "RunningPlan",
                             R"(A plan that is made in the background; foremoe.start_plan() begins it.

Micro-steps are planned in order. begin() returns the plan when its placement is final: slots and homes do not change
any more. The quotas of a micro-step are final when wait_for() has returned; do not read those of later ones.)")
      .def(
          "begin", &begun,
          "Waits until slots and homes are final, and returns the plan. Raises what planning raised, or PolicySkipped.")
      .def("wait_for", &BackgroundPlan::wait_for, "micro_step"_a,
           "Waits until the quotas of this micro-step, and of all before it, are final.")
      .def(
          "finish",
          [](const std::shared_ptr<BackgroundPlan>& self) {
            if (self->num_micro_steps() > 0) self->wait_for(self->num_micro_steps() - 1);
            return begun(self);
          },
          "Waits until all of it is final, and returns the plan.");
  m.def(
      "_start_plan",
      [](const Load& load, const std::string& policy, const nb::dict& options, const nb::object& homes,
         const Plan* previous, const Load* previous_load, int threads) {
        return std::make_shared<BackgroundPlan>(load,
                                                Request{policy, options, homes, previous, previous_load, threads});
      },
      "load"_a, "policy"_a, "options"_a, "homes"_a.none(), "previous"_a.none(), "previous_load"_a.none(), "threads"_a);

  const auto evaluates = [&m](const char* name, bool simulates) {
    m.def(
        name,
        [simulates](const Load& load, const std::vector<std::string>& policies, const nb::dict& options,
                    const nb::object& homes, const Plan* previous, const Load* previous_load, int threads) {
          return evaluations_of(load, policies, {{}, options, homes, previous, previous_load, threads}, simulates);
        },
        "load"_a, "policies"_a, "options"_a, "homes"_a.none(), "previous"_a.none(), "previous_load"_a.none(),
        "threads"_a);
  };
  evaluates("_compare", false);
  evaluates("_simulate", true);

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
  m.def("_option_tables", &option_tables);
}

}  // namespace foremoe::python
