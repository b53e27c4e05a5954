// The tables of options, from which keywords and command lines are made.

#include "bindings.h"
#include "foremoe/evaluate/cost_request.h"
#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/synthesis/synthesis_request.h"

namespace foremoe::python {
namespace {

// What is known of each option, by table.
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

}  // namespace

void bind_options(nb::module_& m) { m.def("_option_tables", &option_tables); }

}  // namespace foremoe::python
