// foremoe simulate: what a step would take on a cluster, policy by policy.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "command.h"
#include "cost_arguments.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "help_text.h"
#include "measured_plan.h"
#include "messages.h"
#include "option_checks.h"
#include "output_file.h"
#include "simulated_policy.h"
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
  step s      recompute and policy update, and moves of homes before them
  speedup     over vanilla
  of ideal    what the step would take with every rank at the mean load and nothing copied ÷ what it takes
  exposed s   waited for copies, and for gradients on their way home
  peak        the most token–expert assignments that a rank computes in one layer of one micro-step
  GB          memory of the rank that holds most: weights, gradients, optimizer, guests, activations
  RL          speedup of the whole RL step, with --rollout-seconds
  largest     tokens of a rank's micro-step, in the mean, with which the fullest rank stays within --memory-budget
)";

constexpr double kBytesPerGigabyte = 1e9;

struct SimulateArguments {
  InputOptions input;
  PlannerArguments planner;
  CostArguments cost;
  std::vector<std::string> policies{"all"};
  std::string timeline;
  double rollout_seconds = 0;
  double memory_budget_gigabytes = 0;  // 0: none
  int depth = kDefaultDepth;           // turns
  PathChoice path = PathChoice::kAuto;
  bool choose_residency = false;
  bool json = false;
};

PathChoice parse_path(const std::string& text) {
  if (text == "auto") return PathChoice::kAuto;
  if (text == "host") return PathChoice::kHost;
  if (text == "peer") return PathChoice::kPeer;
  throw CLI::ValidationError("--path", fmt::format("'{}', expected auto, host or peer", text));
}

// The one model that the load can be of.
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

std::string of_gigabytes(Bytes bytes) {
  return fmt::format("{:.1f}", static_cast<double>(bytes.value) / kBytesPerGigabyte);
}

void print(const std::vector<SimulatedRow>& rows, const LoadTable& load, const SimulateArguments& arguments,
           const CostModel& cost) {
  fmt::print("{}: {}\n{}; {} per rank and layer, residency {}, {} in flight\n", load.name, describe(load),
             describe(cost), counted(arguments.planner.options.guest_slots, "guest slot"),
             arguments.choose_residency ? "auto" : to_string(arguments.planner.options.residency),
             counted(arguments.planner.options.in_flight, "micro-step"));
  if (load.num_layers() < cost.model().moe_layers) {
    fmt::print("each layer of the input stands for {:.4g} of the model's {}\n",
               static_cast<double>(cost.model().moe_layers) / load.num_layers(), cost.model().moe_layers);
  }
  std::vector<std::string> head{"policy", "step s", "speedup", "of ideal", "exposed s", "peak", "GB"};
  if (arguments.rollout_seconds > 0) head.emplace_back("RL");
  if (arguments.memory_budget_gigabytes > 0) head.emplace_back("largest");
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
                                   of_gigabytes(step.memory_bytes_per_rank)};
    if (arguments.rollout_seconds > 0) cells.push_back(fmt::format("{:.3f}×", simulated->rl_step_speedup));
    if (simulated->largest_micro_batch_tokens) {
      cells.push_back(fmt::format("{}", simulated->largest_micro_batch_tokens->value));
    }
    table.add(std::move(cells));
  }
  fmt::print("\n{}", table.to_string());
}

InputOptions with_nodes_of(const Cluster& cluster, InputOptions input) {
  if (input.ranks_per_node == 0) input.ranks_per_node = cluster.ranks_per_node;
  return input;
}

// As other commands have it, and auto.
void add_residency_option(CLI::App& command, SimulateArguments& arguments) {
  const std::string meaning = command.get_option("--residency")->get_description();
  const std::string group = command.get_option("--residency")->get_group();
  command.remove_option(command.get_option("--residency"));
  const auto parse = [&arguments](const std::string& text) {
    arguments.choose_residency = text == "auto";
    if (arguments.choose_residency) return;
    const auto residency = residency_from_string(text);
    if (!residency) {
      throw CLI::ValidationError("--residency",
                                 fmt::format("'{}', expected static, resident, shared, free or auto", text));
    }
    arguments.planner.options.residency = *residency;
  };
  command
      .add_option_function<std::string>(
          "--residency", parse,
          meaning + ". auto: of static, resident and shared the quickest within --memory-budget, free in recompute")
      ->type_name("WORD")
      ->default_str("resident")
      ->group(group);
}

int run(const SimulateArguments& arguments) {
  expect_output(arguments.timeline, {arguments.input.path}, "--timeline");
  const std::vector<const Policy*> policies = policies_named(arguments.policies);
  ThreadPool pool(static_cast<std::size_t>(arguments.planner.threads));
  const PlanningInput input = read_planning_input(with_nodes_of(find_cluster(arguments.cost.cluster), arguments.input),
                                                  arguments.planner, pool);
  CostArguments cost_arguments = arguments.cost;
  if (cost_arguments.model.empty()) cost_arguments.model = model_of(input.step.load);
  const CostModel cost = cost_model(cost_arguments);
  const PlannerOptions options = within_cost(arguments.planner, cost, input.step.load);

  Timeline timeline;
  SimulationSetup setup{.cost = cost,
                        .path = arguments.path,
                        .depth = arguments.depth,
                        .rollout_seconds = arguments.rollout_seconds,
                        .choose_residency = arguments.choose_residency,
                        .timeline = arguments.timeline.empty() ? nullptr : &timeline};
  if (arguments.memory_budget_gigabytes > 0) {
    setup.memory_budget = Bytes{static_cast<std::int64_t>(arguments.memory_budget_gigabytes * kBytesPerGigabyte)};
  }
  const std::vector<SimulatedRow> rows =
      simulate_policies(policies, {.input = input, .options = options, .align = arguments.planner.align}, setup, pool);
  if (!arguments.timeline.empty()) write_file(arguments.timeline, timeline.to_json());
  if (arguments.json) {
    nlohmann::ordered_json array = nlohmann::ordered_json::array();
    for (const SimulatedRow& row : rows) array.push_back(to_json(row));
    fmt::print("{}\n", array.dump(2));
  } else {
    print(rows, input.step.load, arguments, cost);
  }
  return kOk;
}

}  // namespace

Command simulate_command(CLI::App& parent) {
  auto arguments = std::make_shared<SimulateArguments>();
  arguments->planner.models_cost = true;
  CLI::App* const command = parent.add_subcommand(
      "simulate", "Say what a step would take on a cluster, and what each policy would gain there");
  add_input_options(*command, arguments->input);
  command->add_option("--policy", arguments->policies, "Who plans: all, or names from below between commas")
      ->type_name("A,B,…")
      ->delimiter(',')
      ->default_str("all");
  add_cost_options(*command, arguments->cost, CostUse::kRequired);
  command->get_option("--model")->required(false)->default_str("the one that fits the input");
  const std::string group = "Simulation";
  command
      ->add_option("--rollout-seconds", arguments->rollout_seconds,
                   "How long the rollout of a step takes: counted in the speedup of the RL step, whoever plans")
      ->type_name("S")
      ->check(CLI::NonNegativeNumber)
      ->group(group);
  command
      ->add_option("--memory-budget", arguments->memory_budget_gigabytes,
                   "Of one rank, in 10⁹ bytes: tells the largest micro-batch that fits")
      ->type_name("GB")
      ->check(CLI::PositiveNumber)
      ->group(group);
  command
      ->add_option("--prefetch-depth", arguments->depth,
                   "Turns (a layer of a pass of a micro-step) ahead of which copies may begin")
      ->type_name("TURNS")
      ->capture_default_str()
      ->check(in_range(1, 1 << 16))
      ->group(group);
  command
      ->add_option_function<std::string>(
          "--path", [arguments](const std::string& text) { arguments->path = parse_path(text); },
          "Where copies come from. host: the node's arena. peer: the rank that owns the expert. auto: whichever path "
          "is "
          "less busy")
      ->type_name("WORD")
      ->default_str("auto")
      ->group(group);
  command
      ->add_option(
          "--timeline", arguments->timeline,
          "Write what each rank does when, as a trace for Perfetto: the last policy's step, the input's layers")
      ->type_name("FILE")
      ->group(group);
  add_planner_options(*command, arguments->planner);
  add_residency_option(*command, *arguments);
  add_align_option(*command, arguments->planner.align);
  add_threads_option(*command, arguments->planner.threads);
  command->add_flag("--json", arguments->json,
                    "Print an array of objects: keys of compare --json and of the simulation");
  teach(*command, kExamples, fmt::format("{}\nPolicies:\n{}", kMeaning, list_of_policies()));
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli
