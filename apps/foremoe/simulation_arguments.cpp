#include "simulation_arguments.h"

#include <fmt/format.h>

#include "foremoe/core/error.h"
#include "option_checks.h"

namespace foremoe::cli {
namespace {

constexpr double kBytesPerGigabyte = 1e9;
constexpr const char* kGroup = "Simulation";

PathChoice parse_path(const std::string& text) {
  if (text == "auto") return PathChoice::kAuto;
  if (text == "host") return PathChoice::kHost;
  if (text == "peer") return PathChoice::kPeer;
  throw CLI::ValidationError("--path", fmt::format("'{}', expected auto, host or peer", text));
}

std::string model_of(const LoadTable& load) {
  std::string fitting;
  std::string names;
  int count = 0;
  for (const ModelShape& shape : model_shapes()) {
    const bool fits =
        shape.experts == load.num_experts() && shape.top_k == load.top_k && shape.moe_layers >= load.num_layers();
    if (!fits) continue;
    fitting = shape.name;
    names += (count++ == 0 ? "" : ", ") + shape.name;
  }
  if (count == 1) return fitting;
  throw InputError({.file = "--model", .field = {}, .index = {}},
                   count == 0 ? fmt::format("no model has {} experts and top-{} as {} does", load.num_experts(),
                                            load.top_k, load.name)
                              : fmt::format("is needed: {} all fit {}", names, load.name));
}

}  // namespace

void add_memory_budget_option(CLI::App& command, double& gigabytes, const std::string& use) {
  command.add_option("--memory-budget", gigabytes, "Of one rank, in 10⁹ bytes: " + use)
      ->type_name("GB")
      ->check(positive_number())
      ->group(kGroup);
}

void add_simulation_options(CLI::App& command, SimulationArguments& arguments, const std::string& budget_use) {
  command
      .add_option("--rollout-seconds", arguments.rollout_seconds,
                  "How long the rollout of a step takes: counted in the speedup of the RL step, whoever plans")
      ->type_name("S")
      ->check(number_from_zero())
      ->group(kGroup);
  add_memory_budget_option(command, arguments.memory_budget_gigabytes, budget_use);
  command
      .add_option("--prefetch-depth", arguments.depth,
                  "Turns (a layer of a pass of a micro-step) ahead of which copies may begin")
      ->type_name("TURNS")
      ->capture_default_str()
      ->check(in_range(1, 1 << 16))
      ->group(kGroup);
  command
      .add_option_function<std::string>(
          "--path", [&arguments](const std::string& text) { arguments.path = parse_path(text); },
          "Where copies come from. host: the node's arena. peer: the rank that owns the expert. auto: whichever path "
          "is less busy")
      ->type_name("WORD")
      ->default_str("auto")
      ->group(kGroup);
}

SimulationSetup simulation_setup(const SimulationArguments& arguments, const CostModel& cost,
                                 const PlannerArguments& planner) {
  SimulationSetup setup{.cost = cost,
                        .path = arguments.path,
                        .depth = arguments.depth,
                        .rollout_seconds = arguments.rollout_seconds,
                        .memory_budget = {},
                        .choose_residency = planner.choose_residency};
  if (arguments.memory_budget_gigabytes > 0) {
    setup.memory_budget = Bytes{static_cast<std::int64_t>(arguments.memory_budget_gigabytes * kBytesPerGigabyte)};
  }
  return setup;
}

CostModel cost_model_for(CostArguments arguments, const LoadTable& load) {
  if (arguments.model.empty()) arguments.model = model_of(load);
  return cost_model(arguments);
}

}  // namespace foremoe::cli
