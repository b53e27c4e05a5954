// foremoe run: executes a workload with real experts on N ranks, under each policy or a given plan, and compares the
// results with a reference.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "console.h"
#include "run_execution.h"
#include "run_report.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kRunExamples =
    R"(  foremoe run step.trace.safetensors --guest-slots 1                          vanilla and foremoe; ranks are threads
  foremoe run step.load.safetensors --ranks 4 --fold --policy vanilla,eplb,static,foremoe --layers 2 --micro-steps 3
  foremoe run step.trace.safetensors --plan plan.safetensors --timeline run.json   execute a plan; write a timeline
  foremoe run step.load.safetensors --in-flight 4 --residency shared --json
  mpirun -np 8 foremoe run step.trace.safetensors --comm mpi                  one process per rank
)";

constexpr std::string_view kRunMeaning =
    R"(The command runs a stack of MoE layers, x ← x + MoE(x), with random weights and tokens, and replays the routes of the
input. For a load file, it generates tokens whose routes add up to the load. The router chooses the experts of rows
without a route. Experts are SwiGLU networks in float32. Recompute is a forward pass over all micro-steps. Policy update
is a forward and a backward pass, followed by an optimizer step. Copies of experts overlap with computation. Policies
that require residency free run recompute only.

Exit codes: 0 all results equal the reference; 1 a result differs from the reference or between repeats; 2 wrong usage or
input; 3 the run failed because a rank died or an indispensable copy did not arrive.
)";

int run(const RunArguments& arguments) {
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * arguments.timeout_seconds));
  const std::unique_ptr<RankGroup> group = make_rank_group(arguments.comm, timeout);
  if (!group->has_first()) be_quiet();
  try {
    Execution execution(arguments, *group);
    const std::vector<RunRow> rows = execution.run();
    if (!group->has_first()) return kOk;
    const RunSettings settings{
        .optimizer = arguments.optimizer_options(), .repeats = arguments.repeats, .steps = arguments.steps};
    bool ok = true;
    for (const RunRow& row : rows) ok = ok && right(row, settings);
    if (arguments.json) {
      nlohmann::ordered_json array = nlohmann::ordered_json::array();
      for (const RunRow& row : rows) array.push_back(to_json(row, settings));
      fmt::print("{}\n", array.dump(2));
    } else {
      fmt::print("{}\n{}{}", execution.describe(), to_text(rows, settings), meaning_of_columns());
    }
    return ok ? kOk : kFoundWrong;
  } catch (const ReportedElsewhere&) {
    return kOk;  // mpirun ends a job at the first nonzero status, possibly before the reporting rank has printed
  } catch (const PeerFailed& failed) {
    fmt::print(stderr, "foremoe run: {}\n", printable(failed.what()));
    return kGaveUp;
  } catch (const PhaseFailed& failed) {
    fmt::print(stderr, "foremoe run: {}\n", printable(failed.what()));
    return kGaveUp;
  }
}

std::vector<Option> model_options(RunArguments& a) {
  const std::string group = "Model";
  return {integer_option({.name = "hidden", .value = "H", .help = "Hidden size", .group = group, .main = true},
                         a.shape.hidden, {1, 1 << 16}),
          integer_option({.name = "intermediate",
                          .value = "F",
                          .help = "Intermediate size of an expert",
                          .group = group,
                          .main = true},
                         a.shape.intermediate, {1, 1 << 16}),
          word_option<Optimizer::Kind>({.name = "optimizer",
                                        .value = "sgd|adam",
                                        .help = "Optimizer that updates the weights after a policy update",
                                        .group = group},
                                       a.optimizer, {{"sgd", Optimizer::Kind::kSgd}, {"adam", Optimizer::Kind::kAdam}}),
          number_option({.name = "learning_rate",
                         .value = "X",
                         .help = "Learning rate",
                         .initial = "0.01; 0.001 with adam",
                         .group = group},
                        a.rate, {.least = 0, .most = 1e6, .above = true}),
          integer_option({.name = "steps",
                          .value = "N",
                          .help = "Number of optimizer steps on the same batch; prints their losses",
                          .group = group},
                         a.steps, {1, 100'000})};
}

std::vector<Option> copy_options(RunArguments& a) {
  const std::string group = "Copies";
  std::vector<Option> options = only(simulation_options_of(a.evaluate), {"path", "prefetch_depth"});
  for (Option& option : options) option.group = group;
  options.back().help += ". With --residency shared, also the number of sets of guest slots that the layers share";
  options.push_back(number_option({.name = "link_throttle",
                                   .value = "BYTES/S",
                                   .help = "Bandwidth limit of each path of each rank, to emulate slow links",
                                   .initial = "memory bandwidth",
                                   .group = group},
                                  a.link_throttle, {.least = 0, .most = 1e18, .above = true}));
  options.push_back(
      number_option({.name = "work_flops",
                     .value = "N",
                     .help = "Stand-in for attention: a dense matrix product of this many floating-point operations "
                             "before each layer of each pass",
                     .group = group},
                    a.work.flops, {.least = 0, .most = 1e11}));
  options.push_back(
      number_option({.name = "work_ms",
                     .value = "T",
                     .help = "Wait this many milliseconds instead of computing, as a host waits for its device",
                     .initial = "none",
                     .group = group},
                    a.work.wait_ms, {.least = 0, .most = 1e5, .above = true}));
  return options;
}

std::vector<Option> execution_options(RunArguments& a) {
  const std::string group = "Execution";
  return {
      word_option<Comm>({.name = "comm",
                         .value = "threads|mpi",
                         .help = "Run ranks as threads of this process, or as the processes started by mpirun",
                         .group = group,
                         .main = true},
                        a.comm, {{"threads", Comm::kThreads}, {"mpi", Comm::kMpi}}),
      number_option({.name = "timeout",
                     .value = "SECONDS",
                     .help = "Longest wait of one rank for another. A longer wait ends the run with exit code 3",
                     .group = group},
                    a.timeout_seconds, {.least = 0, .most = 86'400, .above = true}),
      integer_option({.name = "repeats",
                      .value = "N",
                      .help = "Runs of each phase, alternately with and without overlapped copies. The critical path "
                              "is fitted to the times of all runs; results must be bitwise identical",
                      .group = group},
                     a.repeats, {1, 1000}),
      flag_option({.name = "bitwise",
                   .help = "Use matrix products whose bits do not depend on a token's position: outputs of all "
                           "policies must be bitwise identical. Prints the slowdown",
                   .group = group},
                  a.bitwise),
      flag_option({.name = "no_reference",
                   .help = "Do not compute the reference, which is slow on large inputs",
                   .group = group,
                   .main = true},
                  a.no_reference),
      text_option({.name = "timeline",
                   .value = "JSON",
                   .help = "Write a timeline of all ranks during each phase's first run, for ui.perfetto.dev or "
                           "chrome://tracing",
                   .group = group,
                   .main = true},
                  a.timeline)};
}

}  // namespace

Command run_command() {
  auto a = std::make_shared<RunArguments>();
  Option phase = word_option({.name = "phase",
                              .value = "both|recompute|policy_update",
                              .help = "Phases to run",
                              .initial = "both",
                              .former = "stage"},
                             {"both", "recompute", "policy_update"}, [a](std::size_t i) {
                               a->phase.reset();
                               if (i > 0) a->phase = i == 1 ? Phase::kRecompute : Phase::kPolicyUpdate;
                             });
  return {
      .name = "run",
      .summary = "Execute real experts on several ranks with the plan of each policy, and check every result",
      .examples = std::string(kRunExamples),
      .meaning = fmt::format("Policies:\n{}\n{}\n{}", list_of_policies(), kRunMeaning, meaning_of_columns()),
      .options = joined(
          {{input_option(a->input.path, "Trace or load file (made by import, collect or synth)")},
           options_of(a->input),
           options_of(a->evaluate.planner),
           {policies_option(a->policies),
            text_option(
                {.name = "plan", .value = "PLAN", .help = "Execute this plan instead of planning", .main = true},
                a->plan),
            word_option({.name = "on_mismatch",
                         .value = "refuse|home",
                         .help = "If the input's routes differ from those of --plan: refuse the plan, or serve the "
                                 "unplanned rows at home",
                         .initial = "refuse"},
                        {"refuse", "home"}, [a](std::size_t i) { a->fit_plan = i == 1; }),
            std::move(phase)},
           model_options(*a),
           execution_options(*a),
           copy_options(*a),
           {threads_option(a->threads), json_option(a->json, "Print an array with one object per policy and phase")}}),
      .run = [a](const Given& given) {
        given.refuse_beside("plan", {"policy", "guest_slots", "residency", "rehome", "stages", "prefer", "tolerance",
                                     "max_copies_per_rank", "max_copies_per_source", "min_tokens_per_guest", "previous",
                                     "previous_load"});
        given.refuse_beside("work_ms", {"work_flops"});
        if (given("on_mismatch") && a->plan.empty()) note("--on-mismatch has no effect without --plan");
        a->given = given;
        return cli::run(*a);
      }};
}

}  // namespace foremoe::cli
