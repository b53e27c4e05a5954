// foremoe plan: a load in, a plan and its figures out.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "foremoe/core/error.h"
#include "foremoe/plan/plan_file.h"
#include "help_text.h"
#include "measured_plan.h"
#include "memory_fit.h"
#include "messages.h"
#include "output_file.h"
#include "simulation_arguments.h"
#include "text_table.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe plan step.load.safetensors --guest-slots 2 --out plan.safetensors
  foremoe plan step.trace.safetensors --ranks 16 --residency static --out plan.safetensors
  foremoe plan step.load.safetensors --in-flight 4 --json   forward and backward in 1F1B order; figures as JSON
  foremoe plan step.load.safetensors --stages BLT           whole experts in place of replication: what is splitting worth?
)";

constexpr std::string_view kMeaning =
    R"(Figures. ρ is the busiest rank's tokens ÷ the mean rank's, in one layer of one micro-step; a layer takes ρ times as
long as it could. mean, p99 and max are over all (layer, micro-step) pairs with load. A copy moves one expert's weights
into one guest slot; an event is a pass (forward or backward) of a micro-step, with one in flight both together.
"foremoe verify" proves a plan right. In --json, tokens are token–expert assignments, plan_seconds wall time,
plan_us_per_layer_micro_step CPU time in µs without stage B.)";

struct PlanArguments {
  InputOptions input;
  PlannerArguments planner;
  CostArguments cost;
  double memory_budget_gigabytes = 0;  // 0: none
  std::string policy = "foremoe";
  std::string out;
  bool json = false;
};

// What verify must know to make the same load again and to hold homes against those before.
void record_input_options(const PlanArguments& arguments, StepPlan& plan) {
  auto options = nlohmann::ordered_json::parse(plan.options);
  const InputOptions& input = arguments.input;
  if (arguments.planner.homes != kContiguous) options["homes"] = arguments.planner.homes;
  if (input.tokens_per_rank != kDefaultTokensPerRank) options["tokens-per-rank"] = input.tokens_per_rank;
  if (input.layers != 0) options["layers"] = input.layers;
  if (input.micro_steps != 0) options["micro-steps"] = input.micro_steps;
  plan.options = options.dump();
}

void print(const MeasuredPlan& measured, const LoadTable& load, const std::string& out) {
  const PlanFigures& f = measured.figures;
  fmt::print("{}: {}\n", load.name, describe(load));
  fmt::print("Planned by {}: residency {}, {} per rank and layer, {} in flight\n\n", f.policy, to_string(f.residency),
             counted(f.guest_slots, "guest slot"), counted(f.in_flight, "micro-step"));
  FactList facts;
  if (f.max_rank_tokens == 0) {
    facts.add("imbalance ρ", "no load");
  } else {
    facts.add("imbalance ρ",
              fmt::format("mean {:.4f}, p99 {:.4f}, max {:.4f}; 1 is perfect, whole tokens permit {:.4f}", f.rho.mean,
                          f.rho.p99, f.rho.max, f.rho_lower_bound_mean));
    facts.add("ρ, padded", fmt::format("mean {:.4f}, max {:.4f}: each replica's tokens rounded up to a multiple of {}",
                                       f.rho_padded.mean, f.rho_padded.max, f.align));
    facts.add("busiest rank", fmt::format("{} tokens in one layer of one micro-step", f.max_rank_tokens));
  }
  facts.add("copies", fmt::format("{:.2f} per layer and event in the whole group, at most {} into one rank",
                                  f.copies_per_layer_event, f.copies_max_per_rank));
  facts.add("guests", fmt::format("{:.2f} copies serve tokens, per layer and event", f.guests_per_layer));
  if (f.home_moves > 0) facts.add("homes", fmt::format("{} moved, over all layers", f.home_moves));
  if (load.topology().num_nodes() > 1) {
    facts.add("busiest node", fmt::format("sends or receives {:.0f} tokens per layer and micro-step, at most {:.0f}",
                                          f.node_link_tokens.mean, f.node_link_tokens.max));
    if (f.node_link_rows) {
      facts.add("", fmt::format("in {:.0f} rows, at most {:.0f}, one per token and node", f.node_link_rows->mean,
                                f.node_link_rows->max));
    }
  }
  facts.add("planning",
            fmt::format("{:.3f} s on {}; {:.1f} µs of CPU per layer and micro-step", measured.times.wall_seconds,
                        counted(measured.threads, "thread"), measured.us_per_layer_micro_step()));
  if (!out.empty()) facts.add("written", out);
  fmt::print("{}", facts.to_string());
}

// The policy update's plan of the residency with which a step is quickest.
std::variant<MeasuredPlan, Skipped> measure_best(const MeasureProblem& problem, const PlanArguments& arguments,
                                                 const std::optional<CostModel>& cost, ThreadPool& pool) {
  if (!cost) {
    throw InputError({.file = "--residency", .field = {}, .index = {}}, "auto needs --cluster and --model");
  }
  const SimulationArguments simulation{.memory_budget_gigabytes = arguments.memory_budget_gigabytes};
  const SimulationSetup setup = simulation_setup(simulation, *cost, arguments.planner);
  auto result = simulate_policy(problem, setup, pool);
  if (auto* skipped = std::get_if<Skipped>(&result)) return std::move(*skipped);
  auto& simulated = std::get<SimulatedPolicy>(result);
  const NeededMemory needed{.who = fmt::format("residency {}", to_string(simulated.measured.plan.residency)),
                            .bytes = simulated.step.memory_bytes_per_rank};
  for (const std::string& remark : memory_remarks({needed}, *cost, setup.memory_budget)) note(remark);
  return std::move(simulated.measured);
}

int run(const PlanArguments& arguments) {
  if (arguments.memory_budget_gigabytes > 0 && !arguments.planner.choose_residency) {
    throw InputError({.file = "--memory-budget", .field = {}, .index = {}}, "serves --residency auto alone");
  }
  const Policy& policy = policy_named(arguments.policy);
  const PlannerArguments& planner = arguments.planner;
  expect_output(arguments.out, {arguments.input.path, planner.homes == kContiguous ? std::string{} : planner.homes,
                                planner.previous, planner.previous_load});
  const std::optional<CostModel> cost = cost_model_if_given(arguments.cost);
  ThreadPool pool(static_cast<std::size_t>(arguments.planner.threads));
  InputOptions input_options = arguments.input;
  if (cost) take_nodes_of(cost->cluster(), input_options);
  const PlanningInput input = read_planning_input(input_options, planner, pool);
  const LoadTable& load = input.step.load;

  const PlannerOptions options = within_cost(planner, cost, load);
  const MeasureProblem problem{.policy = policy, .input = input, .options = options, .align = planner.align};
  auto result = planner.choose_residency ? measure_best(problem, arguments, cost, pool) : measure(problem, pool);
  if (const auto* skipped = std::get_if<Skipped>(&result)) {
    throw InputError({.file = load.name, .field = {}, .index = {}},
                     fmt::format("policy {} cannot plan it: {}", arguments.policy, skipped->reason));
  }
  auto& measured = std::get<MeasuredPlan>(result);
  if (!arguments.out.empty()) {
    record_input_options(arguments, measured.plan);
    write_plan(measured.plan, arguments.out);
  }
  if (arguments.json) {
    fmt::print("{}\n", to_json(measured).dump(2));
  } else {
    print(measured, load, arguments.out);
  }
  return kOk;
}

}  // namespace

Command plan_command(CLI::App& parent) {
  auto arguments = std::make_shared<PlanArguments>();
  CLI::App* const command = parent.add_subcommand(
      "plan", "Plan where copies of experts sit and which tokens they serve, in every layer of every micro-step");
  add_input_options(*command, arguments->input);
  arguments->planner.models_cost = true;
  arguments->planner.simulates = true;
  add_planner_options(*command, arguments->planner);
  add_cost_options(*command, arguments->cost, CostUse::kOptional);
  add_memory_budget_option(*command, arguments->memory_budget_gigabytes, "--residency auto stays within it");
  command->add_option("--policy", arguments->policy, "Who plans; see below")->type_name("NAME")->capture_default_str();
  command->add_option("-o,--out", arguments->out, "Write the plan here; it appears whole or not at all")
      ->type_name("PLAN");
  add_align_option(*command, arguments->planner.align);
  add_threads_option(*command, arguments->planner.threads);
  command->add_flag("--json", arguments->json, "Print the figures as one JSON object");
  teach(*command, kExamples, fmt::format("Policies:\n{}\n{}", list_of_policies(), kMeaning));
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli
