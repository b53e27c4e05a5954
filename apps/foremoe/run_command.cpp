// foremoe run: executes an input with real experts on N ranks, under each policy or under a given plan, and holds what
// comes out against a reference.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "help_text.h"
#include "measured_plan.h"
#include "messages.h"
#include "run_execution.h"
#include "run_options.h"
#include "run_report.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe run step.trace.safetensors --guest-slots 1                          vanilla and foremoe, ranks as threads
  foremoe run step.load.safetensors --ranks 4 --policy vanilla,eplb,static,foremoe --layers 2 --micro-steps 3
  foremoe run step.trace.safetensors --plan plan.safetensors --timeline run.json   a plan of your own; who did what when
  foremoe run step.load.safetensors --in-flight 4 --residency shared --json
  mpirun -np 8 foremoe run step.trace.safetensors --comm mpi                  one process per rank
)";

constexpr std::string_view kMeaning =
    R"(What runs: a stack of MoE layers, x ← x + MoE(x), with random weights and tokens, replaying the routes of the input (a
load without tokens is dealt to tokens that fit it; rows without a route go where the router sends them). Experts are
SwiGLU networks in float32. The stage recompute is a forward pass over all micro-steps; policy update is forward and
backward, then an optimizer step. Copies of experts travel while the ranks work. A policy that can only place experts
freely runs recompute alone.

Exit codes: 0 every result is equal to the reference; 1 one is not, or repeats differ; 2 wrong usage or input; 3 the run
could not go on: a rank died, or a copy never came that could not be done without.
)";

int run(const RunArguments& arguments) {
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * arguments.timeout_seconds));
  const std::unique_ptr<RankGroup> group = make_rank_group(arguments.comm, timeout);
  if (!group->has_first()) say_nothing();
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
  } catch (const ToldElsewhere&) {
    return kBadInput;
  } catch (const PeerFailed& failed) {
    fmt::print(stderr, "foremoe run: {}\n", failed.what());
    return kGaveUp;
  } catch (const PhaseFailed& failed) {
    fmt::print(stderr, "foremoe run: {}\n", failed.what());
    return kGaveUp;
  }
}

}  // namespace

Command run_command(CLI::App& parent) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* const command = parent.add_subcommand(
      "run", "Execute an input with real experts on several ranks, planned by each policy, and check every result");
  add_run_options(*command, *arguments);
  teach(*command, kExamples, fmt::format("Policies:\n{}\n{}\n{}", list_of_policies(), kMeaning, meaning_of_columns()));
  const CLI::Option* const homes = command->get_option("--homes");
  const CLI::Option* const in_flight = command->get_option("--in-flight");
  return {command, [arguments, homes, in_flight] {
            arguments->homes_given = homes->count() > 0;
            arguments->in_flight_given = in_flight->count() > 0;
            return run(*arguments);
          }};
}

}  // namespace foremoe::cli
