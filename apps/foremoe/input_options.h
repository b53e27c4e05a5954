#pragma once

// INPUT of a command: a trace or a load file, made into the load that is planned. A trace is batched as recorded or
// by tokens, a load folded to fewer ranks; when that is not what the file says, a line on stderr tells.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "foremoe/core/parallel.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe::cli {

inline constexpr std::int64_t kDefaultTokensPerRank = BatchingOptions{}.tokens_per_rank;

struct InputOptions {
  std::string path;
  int ranks = 0;           // 0: as the file says
  int wanted_ranks = 0;    // taken instead of 0 where the file permits it
  int ranks_per_node = 0;  // 0: as the file says
  std::int64_t tokens_per_rank = kDefaultTokensPerRank;
  int layers = 0;       // the first so many; 0: all
  int micro_steps = 0;  // the first so many; 0: all
};

// A step to plan, with its trace when the input was one.
struct StepInput {
  LoadTable load;
  std::optional<RoutingTrace> trace;
  std::optional<Batching> batching;
  bool cut = false;  // the load is the first layers or micro-steps of what trace and batching have

  // The tokens behind the load, all of them; null when they are not known or are of more than the load.
  const RoutingTrace* trace_or_null() const { return trace && !cut ? &*trace : nullptr; }
  const Batching* batching_or_null() const { return batching && !cut ? &*batching : nullptr; }
};

// INPUT, --ranks, --ranks-per-node, --tokens-per-rank.
struct InputHelp {
  std::string input;
  std::string ranks;  // what other ranks than recorded do
};
void add_batching_options(CLI::App& command, InputOptions& options, const InputHelp& help);
// The same, --layers and --micro-steps.
void add_input_options(CLI::App& command, InputOptions& options);

// Throws InputError, which names `foremoe import` when the file is no safetensors file.
Safetensors open_input(const std::string& path);

// Throw InputError. read_step also when the ranks do not divide the experts.
Batching batch(const RoutingTrace& trace, const InputOptions& options);  // says on stderr when it batches anew
StepInput read_step(const InputOptions& options, ThreadPool& pool);

// The input as the makers of a plan saw it, as far as the user does not say otherwise.
InputOptions input_as_planned(const StepPlan& plan, InputOptions input);

// "14 micro-steps × 2 layers, 128 experts on 8 ranks (1 node)".
std::string describe(const LoadTable& load);

}  // namespace foremoe::cli
