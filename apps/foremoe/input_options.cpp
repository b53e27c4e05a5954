#include "input_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"
#include "messages.h"
#include "option_checks.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

// Every rank is the home of as many experts. Found out before anything is told or counted.
void expect_even_homes(const std::string& path, int experts, int ranks) {
  if (ranks == 0 || experts % ranks == 0) return;
  throw InputError(
      {.file = path, .field = {}, .index = {}},
      fmt::format("{} cannot be at home evenly on {} (--ranks)", counted(experts, "expert"), counted(ranks, "rank")));
}

LoadTable folded(LoadTable load, const InputOptions& options) {
  load.name = options.path;
  const int before = load.num_ranks();
  int ranks = options.ranks;
  if (ranks == 0)
    ranks = options.wanted_ranks != 0 && before % options.wanted_ranks == 0 ? options.wanted_ranks : before;
  expect_even_homes(options.path, load.num_experts(), ranks);
  if (ranks != before) {
    load = fold_ranks(load, ranks);
    note(fmt::format("{}: a load of {}, folded to {}: the loads of {} neighbours are added", options.path,
                     counted(before, "rank"), ranks, before / ranks));
  }
  if (options.ranks_per_node != 0) load.ranks_per_node = std::min(options.ranks_per_node, load.num_ranks());
  return load;
}

StepInput collected(RoutingTrace trace, const InputOptions& options, ThreadPool& pool) {
  const int ranks = options.ranks != 0 ? options.ranks : options.wanted_ranks;
  expect_even_homes(options.path, trace.num_experts, ranks != 0 ? ranks : trace.ranks);
  const Activity activity(fmt::format("counting the routes of {}", options.path));
  StepInput step{.trace = std::move(trace)};
  step.batching = batch(*step.trace, options);
  step.load = collect(*step.trace, *step.batching, pool);
  step.load.name = options.path;
  return step;
}

// Whole or damaged: 8 bytes of header length, then a JSON object.
bool looks_like_safetensors(std::span<const std::byte> bytes) {
  std::uint64_t header_bytes = 0;
  if (bytes.size() <= sizeof header_bytes) return false;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  return header_bytes <= kMaxHeaderBytes && bytes[sizeof header_bytes] == std::byte{'{'};
}

}  // namespace

void add_batching_options(CLI::App& command, InputOptions& options, const InputHelp& help) {
  command.add_option("INPUT", options.path, help.input)->required();
  command
      .add_option("--ranks", options.ranks,
                  fmt::format("Accelerators of the expert-parallel group. {} Otherwise as the file says", help.ranks))
      ->type_name("R")
      ->check(in_range(1, kMaxRanks));
  command
      .add_option("--ranks-per-node", options.ranks_per_node,
                  "Ranks that share one fast interconnect. Otherwise as the file says, for a trace batched anew 8")
      ->type_name("N")
      ->check(in_range(1, kMaxRanks));
  command
      .add_option("--tokens-per-rank", options.tokens_per_rank,
                  "When a trace is batched anew: the most tokens of a rank in one micro-step (each counted once, "
                  "however many experts it chose)")
      ->type_name("N")
      ->capture_default_str()
      ->check(in_range(1, std::int64_t{1} << 40));
}

void add_input_options(CLI::App& command, InputOptions& options) {
  add_batching_options(command, options,
                       {.input = "A trace or a load file (made by import, collect or synth)",
                        .ranks = "A trace is batched anew when it was recorded for another number; a load is folded to "
                                 "a divisor of its own."});
  command.add_option("--layers", options.layers, "Only the first N layers")->type_name("N")->check(at_least(1));
  command.add_option("--micro-steps", options.micro_steps, "Only the first N micro-steps")
      ->type_name("N")
      ->check(at_least(1));
}

Batching batch(const RoutingTrace& trace, const InputOptions& options) {
  Batching batching = make_batching(trace, {.num_ranks = options.ranks != 0 ? options.ranks : options.wanted_ranks,
                                            .ranks_per_node = options.ranks_per_node,
                                            .tokens_per_rank = options.tokens_per_rank});
  if (!batching.recorded) {
    const std::string recorded =
        trace.has_batching() ? fmt::format("recorded for {} ranks", trace.ranks) : std::string("no batching recorded");
    note(fmt::format("{}: {}, batched anew: {} on {}, at most {} tokens each", options.path, recorded,
                     counted(batching.num_micro_steps, "micro-step"), counted(batching.num_ranks, "rank"),
                     options.tokens_per_rank));
  }
  return batching;
}

Safetensors open_input(const std::string& path) {
  const auto file = std::make_shared<MappedFile>(path);
  if (!looks_like_safetensors(file->bytes())) {
    throw InputError({.file = path, .field = {}, .index = {}},
                     "is not a safetensors file; `foremoe import` reads other formats");
  }
  return Safetensors::parse(file->bytes(), path, file);
}

StepInput read_step(const InputOptions& options, ThreadPool& pool) {
  const Safetensors file = open_input(options.path);
  StepInput step;
  switch (file_kind(file)) {
    case FileKind::kTrace:
      step = collected(read_trace(file), options, pool);
      break;
    case FileKind::kLoad:
      step.load = folded(read_load(file), options);
      break;
    case FileKind::kPlan:
      file.fail("__metadata__.format", "", "a plan, expected a trace or a load");
  }
  const int layers = options.layers != 0 ? options.layers : step.load.num_layers();
  const int micro_steps = options.micro_steps != 0 ? options.micro_steps : step.load.num_micro_steps();
  if (layers < step.load.num_layers() || micro_steps < step.load.num_micro_steps()) {
    step.load = take_first(step.load, micro_steps, layers);
    step.cut = true;
  }
  return step;
}

InputOptions input_as_planned(const StepPlan& plan, InputOptions input) {
  const auto recorded = nlohmann::json::parse(plan.options);
  const auto take = [&](const char* key, auto initial, auto& value) {
    const auto at = recorded.find(key);
    if (value == initial && at != recorded.end() && at->is_number_unsigned() && *at <= (1U << 30U)) at->get_to(value);
  };
  input.wanted_ranks = plan.num_ranks();
  if (input.ranks_per_node == 0) input.ranks_per_node = plan.ranks_per_node;
  take("tokens-per-rank", kDefaultTokensPerRank, input.tokens_per_rank);
  take("layers", 0, input.layers);
  take("micro-steps", 0, input.micro_steps);
  return input;
}

std::string describe(const LoadTable& load) {
  return fmt::format("{} × {}, {} on {} ({})", counted(load.num_micro_steps(), "micro-step"),
                     counted(load.num_layers(), "layer"), counted(load.num_experts(), "expert"),
                     counted(load.num_ranks(), "rank"), counted(load.topology().num_nodes(), "node"));
}

}  // namespace foremoe::cli
