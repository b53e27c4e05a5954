// foremoe collect: a trace's counts as a load file.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"
#include "help_text.h"
#include "input_options.h"
#include "messages.h"
#include "output_file.h"
#include "planner_arguments.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe collect step.trace.safetensors --out step.load.safetensors                the batching that was recorded
  foremoe collect step.trace.safetensors --ranks 16 --tokens-per-rank 4096 --out step.load.safetensors
)";

constexpr std::string_view kMeaning =
    R"(A load file holds, for every micro-step, layer and rank, how many of the rank's tokens chose each expert: all that planning
needs, at a thousandth of a trace's size. Every row of the trace is validated on the way. Rows without a route
(padding, last tokens) are no load.)";

struct CollectArguments {
  InputOptions input;
  std::string out;
  int threads = 0;
  bool json = false;
};

int run(const CollectArguments& arguments) {
  expect_output(arguments.out, {arguments.input.path});
  ThreadPool pool(static_cast<std::size_t>(arguments.threads));
  const RoutingTrace trace = read_trace(open_input(arguments.input.path));
  const Batching batching = batch(trace, arguments.input);
  LoadTable load;
  {
    const Activity activity(fmt::format("counting the routes of {}", arguments.input.path));
    load = collect(trace, batching, pool);
  }
  std::int64_t assignments = 0;
  for (const Tokens tokens : load.load.flat()) assignments += tokens.value;
  const std::int64_t missing = trace.num_tokens * trace.num_layers - assignments / trace.top_k;

  write_load(load, arguments.out, {{"origin", fmt::format("collected from {}", trace.name)}});
  if (arguments.json) {
    const nlohmann::ordered_json json{{"out", arguments.out},
                                      {"sequences", trace.num_sequences()},
                                      {"tokens", trace.num_tokens},
                                      {"micro_steps", load.num_micro_steps()},
                                      {"layers", load.num_layers()},
                                      {"ranks", load.num_ranks()},
                                      {"ranks_per_node", load.ranks_per_node},
                                      {"experts", load.num_experts()},
                                      {"top_k", load.top_k},
                                      {"recorded_batching", batching.recorded},
                                      {"assignments", assignments},
                                      {"rows_missing", missing}};
    fmt::print("{}\n", json.dump(2));
  } else {
    fmt::print("{}: {}\n{} tokens in {} sequences; {} rows without a route\n", arguments.out, describe(load),
               trace.num_tokens, trace.num_sequences(), missing);
  }
  return kOk;
}

}  // namespace

Command collect_command(CLI::App& parent) {
  auto arguments = std::make_shared<CollectArguments>();
  CLI::App* const command = parent.add_subcommand("collect", "Count a trace's routes: the load of every micro-step");
  add_batching_options(*command, arguments->input,
                       {.input = "A trace file (made by import or synth)",
                        .ranks = "A trace is batched anew when it was recorded for another number."});
  command->add_option("-o,--out", arguments->out, "Write the load here; it appears whole or not at all")
      ->type_name("LOAD")
      ->required();
  add_threads_option(*command, arguments->threads);
  command->add_flag("--json", arguments->json, "Print what was counted as JSON");
  teach(*command, kExamples, kMeaning);
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli
