#pragma once

// The input of a step: load, tokens (if known), homes, and the previous step. read_workload() reads it from the files
// that a user names.

#include <cstdint>
#include <memory>
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
  std::string path = {};   // a trace or a load file
  int ranks = 0;           // 0: as in the file
  int wanted_ranks = 0;    // used if `ranks` is 0 and the file permits it
  bool fold = false;       // `ranks` or `wanted_ranks` may fold a load to fewer ranks
  int ranks_per_node = 0;  // 0: as in the file
  int ep = 0;              // ranks of an expert-parallel group; 0: all
  int group = -1;          // use only this group; -1: all
  std::int64_t tokens_per_rank = BatchingOptions{}.tokens_per_rank;
  int layers = 0;                  // use the first N layers; 0: all
  int micro_steps = 0;             // use the first N micro-steps; 0: all
  int wanted_layers = 0;           // used if `layers` is 0 and the file has as many
  int wanted_micro_steps = 0;      // likewise
  std::string homes{kContiguous};  // or a plan or homes file
  std::string previous = {};       // plan of the previous step; empty: none
  std::string previous_load = {};  // trace or load of the previous step; empty: none
};

// Options for all fields except `path`, `ep` and `group`. A command offers only the options that it uses.
std::vector<Option> options_of(InputOptions& options);
Option ep_option(InputOptions& options);

class FittedChoices;  // plan/token_choice.h

struct Workload {
  LoadTable load;
  std::optional<BatchedTrace> tokens;  // set if the input was a trace
  bool cut = false;                    // the load has only the first layers or micro-steps of `tokens`
  Array<RankId, 2> homes;              // [layer][expert], before planning
  std::optional<StepPlan> previous;
  std::optional<LoadTable> previous_load;
  std::string origin;                     // of the input, from its metadata
  InputOptions asked;                     // the options that it was read with
  std::vector<std::string> remarks;       // decisions of the reader, e.g. "… batched anew …"
  std::shared_ptr<FittedChoices> fitted;  // kept from one evaluation to the next, and shared with the groups

  // Returns the tokens that this load counts, or null if they are unknown or if the load was cut.
  const BatchedTrace* tokens_of_load() const { return tokens && !cut ? &*tokens : nullptr; }

  int num_groups_of_job() const { return asked.ep != 0 ? asked.ranks / asked.ep : 1; }  // this is one of them
  bool groups_share_node() const { return asked.ep != 0 && asked.ranks <= asked.ranks_per_node; }

  bool knows_lengths() const { return tokens && !tokens->trace.whole_batches; }

  // [micro_step][rank]: Σ length² over the sequences of the batch, tokens²; empty if their lengths are unknown. If the
  // load was cut, micro-steps after its last are included.
  Array<double, 2> squared_lengths() const;

  PolicyInput for_policy(const PlannerOptions& options) const;  // refers to this object
};

// Plans `given` with the policy. `given` is for_policy() of the workload or a part of it. Records in the plan's options
// how the workload was read.
PolicyResult plan_with(const Policy& policy, const Workload& workload, const PolicyInput& given, ThreadPool& pool);

// All functions below throw InputError.

// A load in memory, with contiguous homes.
Workload make_workload(LoadTable load);

// Reads all files and checks that their shapes agree. `ep` must be 0.
Workload read_workload(const InputOptions& options, ThreadPool& pool);

// Expert-parallel groups: a job of R ranks with `ep` N has R ÷ N groups of N consecutive ranks, each with all experts.
// A group must lie within a node or begin at a node's boundary.

// Returns one group of the whole job's load and tokens, and of the previous step's load, with contiguous homes.
Workload take_group(const Workload& whole, int ep, int group);
std::vector<Workload> split_groups(const Workload& whole, int ep);

// Like read_workload(), one workload per group; the only workload if `ep` is 0. `homes` are those of every group.
// `previous` stands for the plans of all groups, see group_path().
std::vector<Workload> read_groups(const InputOptions& options, ThreadPool& pool);

// "plan-group3.safetensors": the file of a group whose files `path` names together.
std::string group_path(const std::string& path, std::size_t group);

// Returns `asked`, or `there` if it is 0. Throws InputError for `field` if `file` has fewer.
int number_to_use(const char* field, int asked, int there, const std::string& file);

// Reads only load and tokens, of the whole job unless options.group is set.
Workload read_load_or_trace(const InputOptions& options, ThreadPool& pool);

// Batches a trace as recorded. If no batching is recorded for these ranks, batches by tokens and adds to `remarks`.
Batching batch(const RoutingTrace& trace, const InputOptions& options, std::vector<std::string>& remarks);

// [layer][expert]: contiguous, those of a homes file, or the final homes of a plan file.
Array<RankId, 2> initial_homes(const std::string& homes, const LoadTable& load);

// Digest of homes as plans record it: empty if they are contiguous.
std::string recorded_digest(ArrayView<const RankId, 2> home, const LoadTable& load);

// Adds the input options to the plan's options, so that a reader can rebuild the load and check which homes changed.
void record_input_options(const Workload& workload, StepPlan& plan);

// Inverse of record_input_options(): completes `options` with the input options recorded in the plan.
InputOptions input_as_planned(const StepPlan& plan, InputOptions options);

// Adds a remark if rows have no route, besides those of last tokens. `load` was counted from the trace.
void note_missing_rows(const RoutingTrace& trace, const LoadTable& load, std::vector<std::string>& remarks);

// "14 micro-steps × 2 layers, 128 experts on 8 ranks (1 node)".
std::string describe(const LoadTable& load);
// The same; with `ep`, of the first group, after the number of groups.
std::string describe(const std::vector<Workload>& groups);

// "1 rank", "8 ranks".
std::string counted(std::int64_t n, std::string_view noun);

}  // namespace foremoe
