// Options: tables, valid names, and checks before planning.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <span>

#include "evaluation.h"
#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/policy/own_options.h"
#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/synthesis/synthesis_request.h"

namespace foremoe::python {
namespace {

// Properties of each option, by table.
nb::dict option_tables() {
  PlannerOptions planner;
  EvaluateOptions evaluate;
  CostRequest cost;
  ModelShape shape;
  InputOptions input;
  ImportOptions import;
  SynthesisRequest synthesis;
  const std::vector<std::pair<const char*, std::vector<Option>>> tables{{"planner", options_of(planner)},
                                                                        {"planning", planning_options_of(evaluate)},
                                                                        {"simulation", simulation_options_of(evaluate)},
                                                                        {"cost", options_of(cost)},
                                                                        {"shape", options_of(shape)},
                                                                        {"input", options_of(input)},
                                                                        {"groups", {ep_option(input)}},
                                                                        {"import", options_of(import)},
                                                                        {"synthesis", options_of(synthesis)}};
  nb::dict result;
  for (const auto& [name, table] : tables) {
    nb::list list;
    for (const Option& option : table) {
      nb::dict d;
      d["name"] = option.name;
      d["letter"] = option.letter == 0 ? std::string() : std::string(1, option.letter);
      d["value"] = option.value;
      d["type"] = option.type;
      d["range"] = option.range;
      d["words"] = option.words;
      d["default"] = option.initial;
      d["help"] = option.help;
      d["group"] = option.group;
      d["main"] = option.main;
      list.append(d);
    }
    result[name] = list;
  }
  return result;
}

// Checks the keywords of evaluate() without a load. Returns the model's sizes, or None without a model.
nb::object check_evaluation(const nb::dict& keywords) {
  EvaluateOptions options;
  CostRequest cost;
  set_options(keywords, options, cost);
  try {
    if (!cost.cluster.empty()) (void)find_cluster(cost.cluster);
  } catch (const InputError& error) {
    if (error.where().file.empty()) throw;
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

}  // namespace

void bind_options(nb::module_& m) {
  m.def("_option_tables", &option_tables);
  m.def("_policies_named", [](const std::vector<std::string>& names) {
    std::vector<std::string> all;
    for (const Policy* policy : policies_named(names)) all.emplace_back(policy->name());
    return all;
  });
  m.def("_ranks_per_node", [](const std::string& cluster) { return find_cluster(cluster).ranks_per_node; });
  m.def(
      "_own_options",
      [](const std::string& policy, const nb::dict& own) {
        (void)with_own_options({&policy_named(policy)}, own);  // throws for an invalid option
        std::vector<std::string> names;
        for (const Option& option : policy_with_options(policy_named(policy)).options) names.push_back(option.name);
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
      nb::sig("def policies() -> dict[str, str]"), "Returns all policies: name → one-line summary.");
  m.def(
      "model_parameters",
      [](const std::string& model) {
        const ModelShape shape = model_named(model);
        nb::dict d;
        d["experts"] = shape.parameters_in_experts();
        d["other"] = shape.parameters_besides_experts();
        d["total"] = shape.parameters();
        d["active"] = shape.active_parameters();
        d["moe_layers"] = shape.moe_layers;
        d["experts_per_layer"] = shape.experts;
        d["top_k"] = shape.top_k;
        d["notes"] = shape.notes;
        return d;
      },
      "model"_a, nb::sig("def model_parameters(model: str) -> dict[str, int | list[str]]"),
      "Returns a model's numbers of parameters (in `experts`, `other`, `total`, `active` for one token; without norms "
      "and biases), its moe_layers, experts_per_layer and top_k, and notes on parts that are not counted.\n\n"
      "Args:\n    model: Name of a built-in model, or path of a config.json or of a TOML file that describes a model.");
  m.def("clusters", &cluster_names, "Returns the names of the built-in clusters.");
  m.def("models", &model_names, "Returns the names of the built-in models.");
  m.def("_check_evaluation", &check_evaluation, "options"_a,
        nb::sig("def _check_evaluation(options: dict[str, typing.Any]) -> dict[str, typing.Any] | None"));
}

}  // namespace foremoe::python
