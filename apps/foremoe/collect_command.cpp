// foremoe collect: a trace's counts as a load file.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "console.h"
#include "foremoe/evaluate/step_input.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe collect step.trace.safetensors --out step.load.safetensors                the batching that was recorded
  foremoe collect step.trace.safetensors --ranks 16 --tokens-per-rank 4096 --out step.load.safetensors
)";

constexpr std::string_view kMeaning =
    R"(A load file holds, for every micro-step, layer and rank, how many of the rank's tokens chose each expert: all that
planning needs, at a thousandth of a trace's size. Every row of the trace is validated. Rows without a route (padding,
last tokens) are no load.
)";

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
  std::vector<std::string> remarks;
  const Batching batching = batch(trace, arguments.input, remarks);
  note_all(remarks);
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

Command collect_command() {
  auto a = std::make_shared<CollectArguments>();
  Option out = out_option(a->out, "LOAD", "Write the load here; it appears whole or not at all");
  out.required = true;
  return {.name = "collect",
          .summary = "Count a trace's routes: the load of every micro-step",
          .examples = std::string(kExamples),
          .meaning = std::string(kMeaning),
          .options = joined(
              {{input_option(a->input.path, "Trace file (made by import or synth)")},
               only(options_of(a->input), {"ranks", "ranks_per_node", "tokens_per_rank"}),
               {std::move(out), threads_option(a->threads), json_option(a->json, "Print what was counted as JSON")}}),
          .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli
