// foremoe simulate: what a step would take on a cluster, policy by policy.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "command.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "help_text.h"
#include "measured_plan.h"
#include "memory_fit.h"
#include "messages.h"
#include "option_checks.h"
#include "output_file.h"
#include "simulation_arguments.h"
#include "text_table.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe simulate step.load.safetensors --cluster h100 --model qwen3-30b-a3b --guest-slots 2
  foremoe simulate step.trace.safetensors --cluster h100 --policy eplb,foremoe --rollout-seconds 120 --json
  foremoe simulate step.load.safetensors --cluster h20 --policy foremoe --timeline step.json
)";

constexpr std::string_view kMeaning =
    R"(A step is recompute (forward) and policy update (forward, backward, optimizer). Ranks wait for each other at every
exchange of rows; copies travel meanwhile over what the exchanges leave of the links, and what is not there in time is
waited for. docs/simulation.md tells what is modelled and what is not.
An input of fewer layers than the model stands for all of them: each of its layers for as many as the model has more,
in seconds, in memory and in bytes. Nodes are as large as the cluster's, unless --ranks-per-node says otherwise.

Columns:
)";

constexpr std::string_view kColumns =
    R"(  step s      recompute and policy update, and moves of homes before them
  speedup     over vanilla
  of ideal    what the step would take with every rank at the mean load and nothing copied ÷ what it takes
  exposed s   waited for copies, and for gradients on their way home
  peak        the most token–expert assignments that a rank computes in one layer of one micro-step
  GB          memory of the rank that holds most: weights, gradients, optimizer, guests, activations
)";

constexpr std::string_view kOfResidency =
    R"(  residency   what --residency auto chose; after the comma recompute's, where that is another
)";
constexpr std::string_view kOfRollout = R"(  RL          speedup of the whole RL step, with --rollout-seconds
)";
constexpr std::string_view kOfBudget =
    R"(  largest     tokens of a rank's micro-step, in the mean, with which the fullest rank stays within --memory-budget
)";

struct SimulateArguments {
  InputOptions input;
  PlannerArguments planner;
  CostArguments cost;
  std::vector<std::string> policies{"all"};
  SimulationArguments simulation;
  std::string timeline;
  bool json = false;
};

std::string residencies(const SimulatedPolicy& simulated) {
  const Residency update = simulated.measured.plan.residency;
  const Residency recompute = simulated.recompute_plan ? simulated.recompute_plan->residency : update;
  return recompute == update ? std::string(to_string(update))
                             : fmt::format("{}, {}", to_string(update), to_string(recompute));
}

std::string legend(const SimulateArguments& arguments) {
  return fmt::format("Columns:\n{}{}{}{}", arguments.planner.choose_residency ? kOfResidency : "", kColumns,
                     arguments.simulation.rollout_seconds > 0 ? kOfRollout : "",
                     arguments.simulation.memory_budget_gigabytes > 0 ? kOfBudget : "");
}

std::vector<std::string> remarks(const std::vector<SimulatedRow>& rows, const SimulationSetup& setup) {
  std::vector<NeededMemory> needed;
  for (const SimulatedRow& row : rows) {
    if (row.get() != nullptr) needed.push_back({.who = row.policy, .bytes = row.get()->step.memory_bytes_per_rank});
  }
  return memory_remarks(needed, setup.cost, setup.memory_budget);
}

void print(const std::vector<SimulatedRow>& rows, const LoadTable& load, const SimulateArguments& arguments,
           const SimulationSetup& setup) {
  const CostModel& cost = setup.cost;
  fmt::print("{}: {}\n{}; {} per rank and layer, residency {}, {} in flight\n", load.name, describe(load),
             describe(cost), counted(arguments.planner.options.guest_slots, "guest slot"),
             arguments.planner.choose_residency ? "auto" : to_string(arguments.planner.options.residency),
             counted(arguments.planner.options.in_flight, "micro-step"));
  if (load.num_layers() < cost.model().moe_layers) {
    fmt::print("each layer of the input stands for {:.4g} of the model's {}\n",
               static_cast<double>(cost.model().moe_layers) / load.num_layers(), cost.model().moe_layers);
  }
  const bool chooses = arguments.planner.choose_residency;
  std::vector<std::string> head{"policy", "step s", "speedup", "of ideal", "exposed s", "peak", "GB"};
  if (chooses) head.insert(head.begin() + 1, "residency");
  if (arguments.simulation.rollout_seconds > 0) head.emplace_back("RL");
  if (arguments.simulation.memory_budget_gigabytes > 0) head.emplace_back("largest");
  TextTable table(head);
  for (const SimulatedRow& row : rows) {
    const SimulatedPolicy* const simulated = row.get();
    if (simulated == nullptr) {
      table.add({row.policy, "skipped: " + std::get<Skipped>(row.result).reason});
      continue;
    }
    const SimulatedStep& step = simulated->step;
    std::vector<std::string> cells{row.policy,
                                   fmt::format("{:.4g}", step.step_seconds),
                                   fmt::format("{:.3f}×", simulated->speedup_over_vanilla),
                                   fmt::format("{:.1f} %", 100 * simulated->fraction_of_ideal()),
                                   fmt::format("{:.4g}", step.exposed_copy_seconds),
                                   fmt::format("{}", step.peak_tokens_per_rank.value),
                                   gigabytes(step.memory_bytes_per_rank)};
    if (chooses) cells.insert(cells.begin() + 1, residencies(*simulated));
    if (arguments.simulation.rollout_seconds > 0) cells.push_back(fmt::format("{:.3f}×", simulated->rl_step_speedup));
    if (simulated->largest_micro_batch_tokens) {
      cells.push_back(fmt::format("{}", simulated->largest_micro_batch_tokens->value));
    }
    table.add(std::move(cells));
  }
  fmt::print("\n{}\n", table.to_string());
  const std::vector<std::string> said = remarks(rows, setup);
  for (const std::string& remark : said) fmt::print("{}\n", remark);
  if (!said.empty()) fmt::print("\n");
  fmt::print("{}", legend(arguments));
}

int run(SimulateArguments arguments) {
  expect_output(arguments.timeline, {arguments.input.path}, "--timeline");
  const std::vector<const Policy*> policies = policies_named(arguments.policies);
  ThreadPool pool(static_cast<std::size_t>(arguments.planner.threads));
  take_nodes_of(find_cluster(arguments.cost.cluster), arguments.input);
  const PlanningInput input = read_planning_input(arguments.input, arguments.planner, pool);
  const CostModel cost = cost_model_for(arguments.cost, input.step.load);
  const PlannerOptions options = within_cost(arguments.planner, cost, input.step.load);

  Timeline timeline;
  SimulationSetup setup = simulation_setup(arguments.simulation, cost, arguments.planner);
  if (!arguments.timeline.empty()) setup.timeline = &timeline;
  const std::vector<SimulatedRow> rows =
      simulate_policies(policies, {.input = input, .options = options, .align = arguments.planner.align}, setup, pool);
  if (!arguments.timeline.empty()) {
    if (std::ranges::none_of(rows, [](const SimulatedRow& row) { return row.get() != nullptr; })) {
      throw InputError(
          {.file = "--timeline", .field = {}, .index = {}},
          fmt::format("has nothing to show: {}: {}", rows.back().policy, std::get<Skipped>(rows.back().result).reason));
    }
    write_file(arguments.timeline, timeline.to_json());
  }
  if (arguments.json) {
    nlohmann::ordered_json array = nlohmann::ordered_json::array();
    for (const SimulatedRow& row : rows) array.push_back(to_json(row));
    fmt::print("{}\n", array.dump(2));
    for (const std::string& remark : remarks(rows, setup)) note(remark);
  } else {
    print(rows, input.step.load, arguments, setup);
  }
  return kOk;
}

}  // namespace

Command simulate_command(CLI::App& parent) {
  auto arguments = std::make_shared<SimulateArguments>();
  arguments->planner.models_cost = true;
  arguments->planner.simulates = true;
  CLI::App* const command = parent.add_subcommand(
      "simulate", "Say what a step would take on a cluster, and what each policy would gain there");
  add_input_options(*command, arguments->input);
  add_policies_option(*command, arguments->policies);
  add_cost_options(*command, arguments->cost, CostUse::kRequired);
  command->get_option("--model")->required(false)->default_str("the one that fits the input");
  add_simulation_options(*command, arguments->simulation,
                         "the largest micro-batch that fits is told, and --residency auto stays within it");
  command
      ->add_option("--timeline", arguments->timeline,
                   "Write what each rank does when, as a trace for Perfetto: the step of the last policy that is not "
                   "skipped, the input's layers")
      ->type_name("FILE")
      ->group("Simulation");
  add_planner_options(*command, arguments->planner);
  add_align_option(*command, arguments->planner.align);
  add_threads_option(*command, arguments->planner.threads);
  command->add_flag("--json", arguments->json,
                    "Print an array of objects: keys of compare --json and of the simulation");
  teach(*command, kExamples,
        fmt::format("{}{}{}{}{}\nPolicies:\n{}", kMeaning, kOfResidency, kColumns, kOfRollout, kOfBudget,
                    list_of_policies()));
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli
