// foremoe pack: assigns the sequences of a trace to micro-steps and ranks by their experts and lengths.

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "command.h"
#include "console.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/packing.h"
#include "foremoe/rollout/trace_file.h"
#include "progress.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kPackExamples =
    R"(  foremoe pack step.trace.safetensors --ranks 8 --tokens-per-rank 8192 --out packed.trace.safetensors
  foremoe pack step.trace.safetensors --ranks 8 --tokens-per-rank 8192 --mini-batches 2 --out packed.trace.safetensors
)";

constexpr std::string_view kPackMeaning =
    R"(Micro-steps that use experts as the whole step does need fewer copies, and guests chosen once per step suffice. The
packing keeps the experts of every micro-step close to the step's, and balances the work of dense layers over ranks.
It starts from the batching by tokens of collect, with as many micro-steps, and moves and exchanges
sequences while that improves both together. The output has the sequences of the input, in the same order, with other
micro-steps and ranks. A mini-batch of n sequences needs 8 · n² bytes of memory.

  ρ          imbalance with experts at their contiguous homes, without replicas: busiest rank ÷ mean rank; mean and
             max over all layers and micro-steps with load. Replicas remove the imbalance that the step's skew leaves
  dense      work of dense layers, Σ length² + 4,096 · length, of the busiest rank ÷ mean rank, both summed over
             micro-steps. JSON: both sums, also of attention, Σ length²
  before     the recorded batching, if it is for the same number of ranks
In JSON, order[micro-step][rank] lists the indices of sequences in the input.
)";

struct PackArguments : PackingOptions {
  std::string input;
  std::string out;
  int threads = 0;
  bool json = false;
};

using Json = nlohmann::ordered_json;

Json figures_json(const PackingFigures& figures) {
  return {{"rho_mean", figures.rho_mean},
          {"rho_max", figures.rho_max},
          {"attention", {{"mean", figures.attention.mean}, {"max", figures.attention.max}}},
          {"dense", {{"mean", figures.dense.mean}, {"max", figures.dense.max}}}};
}

std::string figures_text(const PackingFigures& figures) {
  return fmt::format("ρ mean {:.4f}, max {:.4f}; dense {:.4f}", figures.rho_mean, figures.rho_max,
                     figures.dense.mean > 0 ? figures.dense.max / figures.dense.mean : 1);
}

// Returns the sequences of each cell: [micro_step][rank][i].
Json order_of(const Batching& batching) {
  std::vector<std::vector<std::vector<std::size_t>>> order(
      static_cast<std::size_t>(batching.num_micro_steps),
      std::vector<std::vector<std::size_t>>(static_cast<std::size_t>(batching.num_ranks)));
  for (std::size_t s = 0; s < batching.rank.size(); ++s) {
    order[batching.micro_step[s].index()][batching.rank[s].index()].push_back(s);
  }
  return order;
}

int run(const PackArguments& arguments) {
  expect_output(arguments.out, {arguments.input});
  ThreadPool pool(static_cast<std::size_t>(arguments.threads));
  RoutingTrace trace = read_trace(open_input(arguments.input));
  const Activity activity(fmt::format("packing {}", arguments.input));
  const auto begin = std::chrono::steady_clock::now();
  const Packing packing = pack(trace, arguments, pool);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;

  const Array<RankId, 2> home =
      contiguous_homes(trace.num_layers, trace.num_experts, arguments.num_ranks, trace.experts_of_layer);
  std::optional<PackingFigures> before;
  if (trace.has_batching() && trace.ranks == arguments.num_ranks) {
    before = packing_figures({.trace = trace, .batching = make_batching(trace, {})}, home, pool);
  }
  const PackingFigures after = packing_figures({.trace = trace, .batching = packing.batching}, home, pool);
  std::vector<std::string> remarks;
  note_missing_rows(trace, collect(trace, packing.batching, pool), remarks);
  note_all(remarks);
  record_batching(packing.batching, trace);
  write_trace(trace, arguments.out);

  if (arguments.json) {
    const Json json{{"out", arguments.out},
                    {"micro_steps", packing.batching.num_micro_steps},
                    {"ranks", arguments.num_ranks},
                    {"mini_batches", arguments.num_mini_batches},
                    {"micro_steps_per_mini_batch", packing.micro_steps},
                    {"before", before ? figures_json(*before) : Json()},
                    {"after", figures_json(after)},
                    {"seconds", seconds.count()},
                    {"order", order_of(packing.batching)}};
    fmt::print("{}\n", json.dump(2));
    return kOk;
  }
  print_values(
      "{}: {} in {} of {} on {}, packed in {:.3f} s\n", arguments.out, counted(trace.num_sequences(), "sequence"),
      counted(packing.batching.num_micro_steps, "micro-step"),
      arguments.num_mini_batches == 1 ? "1 mini-batch" : fmt::format("{} mini-batches", arguments.num_mini_batches),
      counted(arguments.num_ranks, "rank"), seconds.count());
  if (before) fmt::print("before: {}\n", figures_text(*before));
  fmt::print("after:  {}\n", figures_text(after));
  return kOk;
}

}  // namespace

Command pack_command() {
  auto a = std::make_shared<PackArguments>();
  Option out = out_option(a->out, "TRACE", "Write the packed trace here, atomically");
  out.required = true;
  return {.name = "pack",
          .summary = "Choose which sequences share a micro-step, and on which rank",
          .examples = std::string(kPackExamples),
          .meaning = std::string(kPackMeaning),
          .options = joined({{input_option(a->input, "Trace file")},
                             options_of(static_cast<PackingOptions&>(*a)),
                             {std::move(out), threads_option(a->threads),
                              json_option(a->json, "Print the figures and the order of sequences as JSON")}}),
          .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli
