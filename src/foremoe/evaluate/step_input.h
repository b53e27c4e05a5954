#pragma once

// What a step is planned from: load, tokens where they are known, homes, and the former step. One reader makes it of
// the files that a user names.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/core/parallel.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/policy/policy.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

inline constexpr std::string_view kContiguous = "contiguous";

struct InputOptions {
  std::string path;        // a trace or a load file
  int ranks = 0;           // 0: as the file says
  int wanted_ranks = 0;    // taken in place of 0 where the file permits it
  int ranks_per_node = 0;  // 0: as the file says
  std::int64_t tokens_per_rank = BatchingOptions{}.tokens_per_rank;
  int layers = 0;                  // the first so many; 0: all
  int micro_steps = 0;             // the first so many; 0: all
  std::string homes{kContiguous};  // or a plan file, whose homes are taken
  std::string previous;            // the former step's plan; empty: none
  std::string previous_load;       // the former step's trace or load; empty: none
};

// Options of the fields above, but the path. A command takes those that it has a use for.
std::vector<Option> options_of(InputOptions& options);

struct StepInput {
  LoadTable load;
  std::optional<RoutingTrace> trace;  // with batching: the tokens behind the load, when the input was a trace
  std::optional<Batching> batching;
  bool cut = false;        // the load is only the first layers or micro-steps of what trace and batching have
  Array<RankId, 2> homes;  // [layer][expert], before planning
  std::optional<StepPlan> previous;
  std::optional<LoadTable> previous_load;
  InputOptions asked;                // as which it was read
  std::vector<std::string> remarks;  // what was done that nobody asked for: "… batched for 16 ranks …"

  // The tokens behind the load, all of them; null when they are unknown or are of more than the load.
  const RoutingTrace* trace_or_null() const { return trace && !cut ? &*trace : nullptr; }
  const Batching* batching_or_null() const { return batching && !cut ? &*batching : nullptr; }

  PolicyInput for_policy(const PlannerOptions& options) const;  // refers to this object
  // What the policy plans from what for_policy() gave, or a part of it. The plan's options tell how this was read.
  PolicyResult plan(const Policy& policy, const PolicyInput& given, ThreadPool& pool) const;
};

// All of the functions below throw InputError.

// A load that is in memory already, with contiguous homes.
StepInput make_step_input(LoadTable load);

// The whole input, its parts held against each other.
StepInput read_step_input(const InputOptions& options, ThreadPool& pool);

// Load, trace and batching alone.
StepInput read_load_or_trace(const InputOptions& options, ThreadPool& pool);

// A trace batched as recorded or, for another number of ranks, by tokens; `remarks` gets a sentence in that case.
Batching batch(const RoutingTrace& trace, const InputOptions& options, std::vector<std::string>& remarks);

// [layer][expert]: contiguous, or those that a plan file ends with.
Array<RankId, 2> initial_homes(const std::string& homes, const LoadTable& load);

// Writes into the plan's options what a reader must know to make the same load again and to hold homes against those
// before.
void record_input_options(const StepInput& input, StepPlan& plan);

// Its inverse: the input as the makers of a plan saw it, as far as the options do not say otherwise.
InputOptions input_as_planned(const StepPlan& plan, InputOptions options);

// Opens a file that must be a safetensors file; the error names `foremoe import` when it is none.
Safetensors open_input(const std::string& path);

// "14 micro-steps × 2 layers, 128 experts on 8 ranks (1 node)".
std::string describe(const LoadTable& load);

// "1 rank", "8 ranks".
std::string counted(std::int64_t n, std::string_view noun);

}  // namespace foremoe
