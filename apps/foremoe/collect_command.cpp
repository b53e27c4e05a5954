// foremoe collect: counts a trace and writes a load file.

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/rollout_follower.h"
#include "foremoe/rollout/trace_file.h"
#include "progress.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kCollectExamples =
    R"(  foremoe collect step.trace.safetensors --out step.load.safetensors                use the recorded batching
  foremoe collect step.trace.safetensors --ranks 16 --tokens-per-rank 4096 --out step.load.safetensors
  foremoe collect --follow rollout/ --ranks 16 --out step.load.safetensors           while the rollout writes traces there
)";

constexpr std::string_view kCollectMeaning =
    R"(A load file contains, for every micro-step, layer and rank, the number of the rank's tokens that chose each expert. The
planner needs nothing else, and the file has a thousandth of the trace's size. Every row of the trace is validated. Rows
without a route (padding, last tokens) do not count as load.

With --follow, the input is a folder. Its *.safetensors files are counted as they appear, until a file named `done`
appears or --sequences sequences have been counted. Writers should rename complete files into the folder; a file that is
not yet readable, because it still grows, is tried again, for 30 seconds if it does not change. A file may be deleted after it was counted, but not
changed. The load does not depend on the order of arrival: sequences are sorted by file name. If every file records
micro-steps and ranks, these are used.
)";

constexpr std::chrono::milliseconds kBetweenPolls{20};
constexpr std::int64_t kMostSequences = 1'000'000'000;

struct CollectArguments {
  InputOptions input;
  bool follow = false;
  std::int64_t sequences = 0;
  std::string out;
  int threads = 0;
  bool json = false;
};

// The counted load and its sequences.
struct Counted {
  RoutingTrace trace;  // without routes if read from a folder
  Batching batching;
  LoadTable load;
  nlohmann::ordered_json timeline = nlohmann::ordered_json::object();  // set if a folder was followed
};

Counted count_file(const CollectArguments& arguments, ThreadPool& pool) {
  Counted counted{.trace = read_trace(open_input(arguments.input.path))};
  std::vector<std::string> remarks;
  counted.batching = batch(counted.trace, arguments.input, remarks);
  note_all(remarks);
  const Activity activity(fmt::format("counting the routes of {}", arguments.input.path));
  counted.load = collect(counted.trace, counted.batching, pool);
  std::vector<std::string> missing;
  note_missing_rows(counted.trace, counted.load, missing);
  note_all(missing);
  return counted;
}

Counted count_folder(const CollectArguments& arguments, ThreadPool& pool) {
  RolloutFollower follower(arguments.input.path, arguments.sequences);
  {
    const Activity activity(fmt::format("following {}", arguments.input.path));
    while (!follower.poll(pool)) std::this_thread::sleep_for(kBetweenPolls);
  }
  const double ended = follower.seconds();
  Counted counted{.trace = follower.sequences()};
  std::vector<std::string> remarks;
  counted.batching = batch(counted.trace, arguments.input, remarks);
  note_all(remarks);
  const double batched = follower.seconds();
  counted.load = follower.to_load_table(counted.batching);
  const double summed = follower.seconds();

  double counting = 0;
  nlohmann::ordered_json files;
  for (const auto& [name, file] : follower.files()) {
    counting += file.counted - file.seen;
    files.push_back({{"name", name},
                     {"sequences", file.header.num_sequences()},
                     {"tokens", file.header.num_tokens},
                     {"seen", file.seen},
                     {"counted", file.counted}});
  }
  counted.timeline = {{"files", files},
                      {"ended", ended},
                      {"seconds_counting", counting},
                      {"seconds_batching", batched - ended},
                      {"seconds_summing", summed - batched}};
  return counted;
}

int run(const CollectArguments& arguments, const Given& given) {
  if (!arguments.follow && given("sequences")) throw InputError({.field = "sequences"}, "needs --follow");
  expect_output(arguments.out, {arguments.input.path});
  ThreadPool pool(static_cast<std::size_t>(arguments.threads));
  const auto [trace, batching, load, timeline] =
      arguments.follow ? count_folder(arguments, pool) : count_file(arguments, pool);
  const std::int64_t assignments = num_assignments(load);

  write_load(load, arguments.out, {{"origin", fmt::format("collected from {}", trace.name)}});
  if (arguments.json) {
    nlohmann::ordered_json json{
        {"out", arguments.out}, {"sequences", trace.num_sequences()}, {"tokens", trace.num_tokens}};
    json.update(shape_json(load));
    json.update(
        {{"recorded_batching", batching.recorded}, {"assignments", assignments}, {"rows_missing", load.missing_rows}});
    json.update(timeline);
    fmt::print("{}\n", json.dump(2));
    return kOk;
  }
  print_values("{}: {}\n{} tokens in {} sequences; {} rows without a route\n", arguments.out, describe(load),
               trace.num_tokens, trace.num_sequences(), load.missing_rows);
  if (arguments.follow) {
    fmt::print("{}, counted in {:.3f} s while the rollout ran; batched and summed in {:.3f} s after it\n",
               counted(static_cast<std::int64_t>(timeline["files"].size()), "file"),
               timeline["seconds_counting"].get<double>(),
               timeline["seconds_batching"].get<double>() + timeline["seconds_summing"].get<double>());
  }
  return kOk;
}

}  // namespace

Command collect_command() {
  auto a = std::make_shared<CollectArguments>();
  Option out = out_option(a->out, "LOAD", "Write the load here, atomically");
  out.required = true;
  return {
      .name = "collect",
      .summary = "Count the routes of a trace into the load of every micro-step",
      .examples = std::string(kCollectExamples),
      .meaning = std::string(kCollectMeaning),
      .options = joined(
          {{input_option(a->input.path, "Trace file (made by import or synth); with --follow, a folder of trace files"),
            flag_option({.name = "follow", .help = "Count trace files as they appear in a folder", .main = true},
                        a->follow),
            integer_option({.name = "sequences",
                            .value = "N",
                            .help = "With --follow: stop after this many sequences",
                            .initial = "until a file `done` appears",
                            .main = true},
                           a->sequences, {1, kMostSequences})},
           only(options_of(a->input), {"ranks", "ranks_per_node", "tokens_per_rank"}),
           {std::move(out), threads_option(a->threads), json_option(a->json, "Print the counts as JSON")}}),
      .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli
