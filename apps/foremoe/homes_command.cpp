// foremoe homes: chooses the rank that owns each expert by co-activation and load.

#include <fmt/format.h>

#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "command.h"
#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/homes/choose_homes.h"
#include "foremoe/homes/homes_json.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/trace_file.h"
#include "progress.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kHomesExamples =
    R"(  foremoe homes step.trace.safetensors --ranks 64 --out homes.safetensors
  foremoe homes step-1.trace.safetensors step-2.trace.safetensors --ranks 64 --holdout 0.25 --out homes.safetensors
  foremoe homes step-1.trace.safetensors --ranks 64 --holdout step-2.trace.safetensors --out homes.safetensors --json
  foremoe simulate step-2.trace.safetensors --ranks 64 --cluster h100 --homes homes.safetensors
)";

constexpr std::string_view kHomesMeaning =
    R"(Under dispatch by token, a token crosses to each other node that is home to any of its experts. foremoe homes places
experts that tokens choose together on the same node, without overloading a node, and spreads the experts of a node over
its ranks by load. Every rank is home to E/R experts of every layer. Homes are chosen once per run, since moving them
moves optimizer state. They help every policy, vanilla too: simulate reports their gain separately (`homes`).
Columns, contiguous homes → chosen homes:
  tokens            token–layer combinations with a route
  pairs per token   other nodes that a token is sent to, in a mean layer
  busiest node      pairs of the node that receives the most ÷ mean
  node load         token–expert assignments at the experts of the busiest node ÷ mean
  rank load         token–expert assignments at the experts of the busiest rank ÷ mean
)";

struct HomesArguments {
  std::vector<std::string> traces;
  InputOptions input;
  std::string holdout;
  std::string out;
  HomesOptions options;
  int threads = 0;
  bool json = false;
};

BatchedTrace read_batched(const std::string& path, InputOptions input) {
  input.path = path;
  BatchedTrace batched{.trace = read_trace(open_input(path))};
  std::vector<std::string> remarks;
  batched.batching = batch(batched.trace, input, remarks);
  note_all(remarks);
  return batched;
}

// Returns the number if the whole text is one.
std::optional<double> number_in(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string> cells(const char* routes, const HomesJudgement& judgement,
                               const nlohmann::ordered_json& json) {
  std::vector<std::string> row{routes, fmt::to_string(judgement.chosen.tokens)};
  for (const char* key : {"pairs_per_token", "busiest_node_pairs", "node_load", "rank_load"}) {
    row.push_back(
        fmt::format("{:.3f} → {:.3f}", json["contiguous"][key].get<double>(), json["chosen"][key].get<double>()));
  }
  const auto before = static_cast<double>(judgement.contiguous.pairs);
  const auto change = static_cast<double>(judgement.chosen.pairs) - before;
  row.push_back(before == 0 ? "none" : fmt::format("{:+.1f} %", 100 * change / before));
  return row;
}

void print(const ChosenHomes& chosen, const nlohmann::ordered_json& json, const std::string& out) {
  print_values("{}: homes of {} × {} on {}, {} to a node; {} not at their contiguous home\n\n", out,
               counted(json["layers"].get<int>(), "layer"), counted(json["experts"].get<int>(), "expert"),
               counted(chosen.homes.num_ranks, "rank"), chosen.homes.ranks_per_node,
               counted(chosen.num_moved, "expert"));
  TextTable table({"routes", "tokens", "pairs per token", "busiest node", "node load", "rank load", "pairs"});
  table.add(cells("fitted", chosen.fitted, json["fitted"]));
  if (chosen.held_out) table.add(cells("held out", *chosen.held_out, json["held_out"]));
  fmt::print("{}", table.to_string());
}

int run(const HomesArguments& arguments) {
  const std::optional<double> fraction = number_in(arguments.holdout);
  if (fraction && !(*fraction > 0 && *fraction < 1)) {
    throw InputError({.field = "holdout"},
                     fmt::format("{}, expected a fraction above 0 and below 1, or a trace", arguments.holdout));
  }
  std::vector<std::string> inputs = arguments.traces;
  if (!fraction) inputs.push_back(arguments.holdout);
  expect_output(arguments.out, inputs);
  std::vector<BatchedTrace> traces;
  for (const std::string& path : arguments.traces) traces.push_back(read_batched(path, arguments.input));
  std::optional<BatchedTrace> other;
  if (!fraction && !arguments.holdout.empty()) other = read_batched(arguments.holdout, arguments.input);
  ThreadPool pool(static_cast<std::size_t>(arguments.threads));
  std::optional<Activity> activity(std::in_place, "choosing homes", &pool.parts());
  const ChosenHomes chosen = choose_homes(
      traces, {.fraction = fraction.value_or(0), .trace = other ? &*other : nullptr}, arguments.options, pool);
  activity.reset();
  write_homes(chosen.homes, arguments.out);
  nlohmann::ordered_json json{{"out", arguments.out}};
  json.update(to_json(chosen));
  if (arguments.json) {
    fmt::print("{}\n", json.dump(2));
  } else {
    print(chosen, json, arguments.out);
  }
  return kOk;
}

}  // namespace

Command homes_command() {
  auto a = std::make_shared<HomesArguments>();
  Option out = out_option(a->out, "HOMES", "Write the homes here, atomically");
  out.required = true;
  return {.name = "homes",
          .summary = "Choose the rank that owns each expert by co-activation and load, once per run",
          .examples = std::string(kHomesExamples),
          .meaning = std::string(kHomesMeaning),
          .options =
              joined({{values_option({.name = "traces",
                                      .value = "TRACE...",
                                      .help = "Trace files (made by import or synth), with the same shape",
                                      .required = true,
                                      .positional = true},
                                     a->traces)},
                      only(options_of(a->input), {"ranks", "ranks_per_node", "tokens_per_rank"}),
                      {text_option({.name = "holdout",
                                    .value = "FRACTION|TRACE",
                                    .help = "Routes that the choice does not see, to judge it: a fraction of the "
                                            "groups of each trace (of the sequences, without groups), or a trace",
                                    .main = true},
                                   a->holdout)},
                      options_of(a->options),
                      {std::move(out), threads_option(a->threads), json_option(a->json, "Print the report as JSON")}}),
          .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli
