// foremoe simulate: models the time of a step on a cluster for each policy.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/memory_remarks.h"
#include "planning_arguments.h"
#include "plot.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kSimulateExamples =
    R"(  foremoe simulate step.load.safetensors --cluster h100 --model qwen3-30b-a3b --guest-slots 2
  foremoe simulate step.trace.safetensors --cluster h100 --model qwen3-30b-a3b --rollout-seconds 120 --json
  foremoe simulate step.load.safetensors --cluster h20 --model qwen3-30b-a3b --policy foremoe --timeline step.json
)";

constexpr std::string_view kSimulateMeaning =
    R"(A step consists of recompute (forward) and policy update (forward, backward, optimizer). Ranks wait for each other at
every exchange of rows. Copies use the link bandwidth that the exchanges leave; ranks wait for late copies.
docs/users/simulation.md describes the model and its limits. Every plan is checked before it is simulated.
If the input has fewer layers than the model, each of its layers represents several of the model's, in seconds, memory and
bytes. The node size is the cluster's unless --ranks-per-node is given.

)";

constexpr std::string_view kSimulateColumns =
    R"(  step s      seconds of home moves, recompute and policy update
  speedup     over vanilla
  framework   speedup with 1.5 ms more per layer and pass for the trainer's own code, as in a step of Megatron-LM
  of ideal    step seconds with every rank at the mean load and no copies ÷ step seconds of this plan
  exposed s   time spent waiting for copies and for gradients that return home
  peak        largest number of token–expert assignments of a rank in one layer of one micro-step
  GB          memory of the rank that uses the most: weights, gradients, optimizer, guests, activations
)";

constexpr std::string_view kOfChoice =
    R"(  plan        residency and --prefer of the plan, or no plan, if foremoe chose among several
)";
constexpr std::string_view kOfRollout =
    R"(  RL s, RL    seconds and speedup of the whole RL step, with --rollout-seconds
)";
constexpr std::string_view kOfBudget =
    R"(  largest     largest mean tokens per rank and micro-step with which all ranks fit --memory-budget
)";

struct SimulateArguments : PlanningArguments {
  std::string timeline;
  std::string plot;
};

std::vector<std::string> remarks(const std::vector<Evaluation>& evaluations, const CostModel& cost,
                                 std::optional<Bytes> budget) {
  std::vector<NeededMemory> needed;
  for (const Evaluation& e : evaluations) {
    if (e.step) needed.push_back({.who = e.policy, .bytes = e.step->memory_bytes_per_rank});
  }
  std::vector<std::string> said = memory_remarks(needed, cost, budget);
  if (!said.empty()) said.push_back(optimizer_remark(cost, evaluations.front().plan.num_ranks()));
  std::erase(said, std::string{});
  return said;
}

// Placement is measured, so it is printed separately from the modelled figures.
void print_placement(const std::vector<Evaluation>& evaluations) {
  bool any = false;
  for (const Evaluation& e : evaluations) {
    if (!e.step || e.placement_seconds <= 0) continue;
    print_values(
        "{} places experts in {:.2g} s, measured here, by {}; {:.2g} s of that after the rollout: {:.4g} s, "
        "{:.3f}×\n",
        e.policy, e.placement_seconds, counted(e.planners, "planner"), e.step->exposed_placement_seconds,
        e.step->placed_step_seconds, e.placed_speedup);
    any = true;
  }
  if (any) fmt::print("\n");
}

std::string describe_dispatch(const std::vector<Evaluation>& evaluations) {
  const auto first = std::ranges::find_if(evaluations, [](const Evaluation& e) { return e.step.has_value(); });
  if (first == evaluations.end()) return "";
  const SimulatedPhase& phase = first->step->policy_update;
  if (phase.dispatch == Dispatch::kRow)
    return "dispatch row: sends every token–expert assignment directly to its rank\n";
  const char* const note = phase.dispatch_estimated
                               ? "; estimated, since a load does not record which experts each token chose together"
                           : phase.rows == Rows::kToken ? "; rows by token, as foremoe.torch sends them"
                                                        : "";
  return fmt::format("dispatch token: sends a token once to each node, and from there once to each rank{}\n", note);
}

std::string describe_attention(const Workload& input, const CostModel& cost) {
  if (attention_of(input.knows_lengths(), cost) == Attention::kSequences)
    return "attention sequences: each sequence by its length in the trace\n";
  return fmt::format("attention mean: all sequences have {} tokens{}\n", cost.sequence_tokens(),
                     input.knows_lengths() ? ", as given, instead of their lengths in the trace" : "");
}

// Returns the row of the table of seconds.
std::vector<std::string> cells_of(const Evaluation& e, bool chooses, bool rollout) {
  if (!e.planned()) return {e.policy, "skipped: " + e.skipped};
  if (!e.step) return {e.policy, "WRONG plan: " + e.check.violations.front().message};
  const SimulatedStep& step = *e.step;
  std::vector<std::string> cells{e.policy,
                                 fmt::format("{:.4g}", step.step_seconds),
                                 fmt::format("{:.3f}×", e.speedup_over_vanilla),
                                 e.framework_step_seconds ? fmt::format("{:.3f}×", e.framework_speedup) : "",
                                 fmt::format("{:.1f} %", 100 * e.fraction_of_ideal()),
                                 fmt::format("{:.4g}", step.exposed_copy_seconds),
                                 fmt::format("{}", step.peak_tokens_per_rank.value),
                                 gigabytes(step.memory_bytes_per_rank)};
  if (chooses) cells.insert(cells.begin() + 1, e.choice ? to_string(e.choice->best()) : "");
  if (rollout) {
    cells.insert(cells.end(), {fmt::format("{:.4g}", step.rl_step_seconds), fmt::format("{:.3f}×", e.rl_step_speedup)});
  }
  if (e.largest_micro_batch_tokens) cells.push_back(fmt::format("{}", e.largest_micro_batch_tokens->value));
  return cells;
}

std::vector<std::string> notes_of(const std::vector<Evaluation>& evaluations, const PlanningSession& session,
                                  const EvaluateOptions& options) {
  std::vector<std::string> said = remarks(evaluations, *session.cost, options.memory_budget());
  for (const Evaluation& e : evaluations) {
    if (e.choice) {
      said.push_back(fmt::format("{}: {}", e.policy, describe(*e.choice)));
    } else if (e.step && e.placed_speedup < 1 && policy_named(e.policy).plans_as_asked()) {
      said.push_back(fmt::format(
          "{}: with planning slower than no plan. Without --residency and --prefer, it would make none", e.policy));
    }
  }
  if (session.groups.front().origin.starts_with("synthetic")) {
    said.emplace_back("the routes are synthetic, not recorded");
  }
  return said;
}

void print(const JobEvaluation& job, const PlanningSession& session, const EvaluateOptions& options) {
  const std::vector<Evaluation>& evaluations = job.policies;
  const Workload& input = session.groups.front();
  const CostModel& cost = *session.cost;
  print_values("{}\n{}; {}\n", session.describe_input(), describe(cost), describe(options));
  if (const std::string layers = describe_layers(input.load, cost); !layers.empty()) fmt::print("{}\n", layers);
  fmt::print("{}{}", describe_dispatch(evaluations), describe_attention(input, cost));
  const bool chooses = std::ranges::any_of(evaluations, [](const Evaluation& e) { return e.choice.has_value(); });
  const bool rollout = options.rollout_seconds > 0;
  std::vector<std::string> head{"policy", "step s", "speedup", "framework", "of ideal", "exposed s", "peak", "GB"};
  if (chooses) head.insert(head.begin() + 1, "plan");
  if (rollout) head.insert(head.end(), {"RL s", "RL"});
  if (options.memory_budget()) head.emplace_back("largest");
  TextTable table(head);
  for (const Evaluation& e : evaluations) table.add(cells_of(e, chooses, rollout));
  fmt::print("\n{}\n", table.to_string());
  if (const Evaluation& first = evaluations.front(); first.homes_speedup && first.step) {
    const double vanilla = first.speedup_over_vanilla * first.step->step_seconds;
    fmt::print(
        "homes: vanilla takes {:.4g} s, with contiguous homes {:.4g} s: {:.3f}×; speedup does not include this\n\n",
        vanilla, *first.homes_speedup * vanilla, *first.homes_speedup);
  }
  print_groups(job);
  print_placement(evaluations);
  const std::vector<std::string> said = notes_of(evaluations, session, options);
  for (const std::string& remark : said) print_values("{}\n", remark);
  fmt::print("{}Columns:\n{}{}{}{}", said.empty() ? "" : "\n", chooses ? kOfChoice : "", kSimulateColumns,
             rollout ? kOfRollout : "", options.memory_budget() ? kOfBudget : "");
}

int run(const SimulateArguments& arguments, const Given& given) {
  expect_plot(arguments.plot, files_of(arguments));
  PlanningSession session(
      arguments, given,
      {.policies = arguments.policies, .simulates = true, .output = arguments.timeline, .output_option = "timeline"});
  std::vector<Timeline> timelines(session.groups.size());
  const JobEvaluation job = session.each_group([&](const Workload& group, EvaluationContext context) {
    if (!arguments.timeline.empty()) context.timeline = &timelines[&group - session.groups.data()];
    return evaluate_all(session.policies, group, arguments.evaluate, context);
  });
  session.progress.end();
  const std::vector<Evaluation>& evaluations = job.policies;
  expect_residency(evaluations.front(), session.residency);
  if (!arguments.timeline.empty()) {
    if (std::ranges::none_of(evaluations, &Evaluation::planned)) {
      throw InputError({.field = "timeline"}, fmt::format("has nothing to show: {}: {}", evaluations.back().policy,
                                                          evaluations.back().skipped));
    }
    for (std::size_t g = 0; g < timelines.size(); ++g) {
      write_file(session.output_of(arguments.timeline, g), timelines[g].to_json());
    }
  }
  if (arguments.json) {
    fmt::print("{}\n", to_json(job, /*checked=*/false).dump(2));
    note_all(remarks(evaluations, *session.cost, arguments.evaluate.memory_budget()));
  } else {
    print(job, session, arguments.evaluate);
  }
  const bool ok = std::ranges::all_of(evaluations, [](const Evaluation& e) { return e.check.ok(); });
  const int code = ok ? kOk : kFoundWrong;
  draw_plot({arguments.plot, Panels::kPhases, session.groups, *session.cost, arguments.evaluate}, evaluations, code);
  return code;
}

}  // namespace

Command simulate_command() {
  auto a = std::make_shared<SimulateArguments>();
  std::vector<Option> planning = planning_options(*a, /*residency_auto=*/true);
  option_named(planning, "cluster").required = true;
  option_named(planning, "model").initial = "the known model that fits the input";
  return {.name = "simulate",
          .summary = "Predict the time of a step on a cluster and the speedup of each policy",
          .examples = std::string(kSimulateExamples),
          .meaning = fmt::format("{}Columns:\n{}{}{}{}\nPolicies:\n{}", kSimulateMeaning, kOfChoice, kSimulateColumns,
                                 kOfRollout, kOfBudget, list_of_policies_and_their_options()),
          .options = joined({std::move(planning),
                             simulation_options_of(a->evaluate),
                             {text_option({.name = "timeline",
                                           .value = "FILE",
                                           .help = "Write a timeline of all ranks for Perfetto: the step of the last "
                                                   "policy that has a plan, with the input's layers",
                                           .group = "Simulation"},
                                          a->timeline),
                              policies_option(a->policies), plot_option(a->plot),
                              json_option(a->json,
                                          "Print an array of objects with the keys of compare --json and of the "
                                          "simulation")}}),
          .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli
