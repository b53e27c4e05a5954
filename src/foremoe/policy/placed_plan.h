#pragma once

// Turns a policy's decisions into a plan. A policy chooses either a placement, i.e. the experts of every rank
// (plan_freely), or shares, i.e. the tokens that leave home (plan_fetched). Both cases derive slots, quotas and bounds
// in the same way.
//
// The plan uses and records only the planner options of empty_plan(), not budgets, preferences or stages.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/planner/token_assignment.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

// Checks and views of the input.

// Throws InputError if an option is out of range or homes do not fit the load. Call expect_valid(load) first.
void check_policy_input(const PolicyInput& input);

// Returns the previous step's load or nullptr. Throws InputError if it is invalid, or if its number of layers or
// experts differs.
const LoadTable* former_load(const PolicyInput& input);

// Returns the previous plan if `policy` made it for the same layers, ranks, experts and guest slots; else nullptr.
const StepPlan* former_plan(const PolicyInput& input, std::string_view policy);

// Returns the placement at the plan's last event: [rank][slot]. Requires an event, which former_plan() checks.
Array<ExpertId, 2> last_placement(const StepPlan& plan, LayerId layer);

// Tokens of one layer, summed over source ranks: [micro_step][expert].
Array<std::int64_t, 2> layer_load(const LoadTable& load, LayerId layer);

// Returns the tokens per expert, summed over `count` micro-steps from `first` on (default: all micro-steps).
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load, std::size_t first,
                                               std::size_t count);
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load);

// Returns a plan with empty slots, zero quotas, loads and bounds, and the input's homes. R must divide E. Records the
// options guest slots, residency and in-flight.
StepPlan empty_plan(std::string_view policy, Residency residency, const PolicyInput& input);

// Runs `plan_layer` for every layer of the plan, from several threads. Their CPU time counts as planning_cpu_seconds.
PlannedStep plan_layers(StepPlan plan, ThreadPool& pool,
                        const std::function<void(LayerId layer, StepPlan& plan)>& plan_layer);

// Placements. The plan has residency `free`. A policy that leaves every expert at home and never changes guests within
// a step gets residency `resident` instead, which allows any number of micro-steps in flight.
//
// Slots. Replicas of one expert on one rank are merged into one, which serves the sum of their parts. The other slots
// stay empty. An expert that stays on a rank from one event to the next keeps its slot. New experts, in ascending
// order, take the lowest free slots. Before the first event, the home slots contain the home experts.
//
// Tokens, by the split:
//   equal   every replica, counted before merging, serves the same whole number of tokens, and the replicas on the
//           lowest ranks serve one token of the remainder each. Published systems route at random or round robin, so
//           their parts are equal on average. Exactly equal parts and the order of the remainder are our assumptions.
//   exact   the smallest maximum rank load that these replicas permit (planner/token_assignment.h)
//   own     the policy splits the tokens itself (own_split)
//
// Homes do not change. They record which rank owns an expert, not which ranks serve it.
enum class Split : std::uint8_t { kEqual, kExact };

// Fills `assignment` with the quotas of micro-step m for the replicas in `graph`, whose slots are the plan's. `load` is
// [expert], tokens; the quotas of an expert's slots sum to its load.
using SplitTokens = std::function<void(MicroStepId m, const planner::ReplicaGraph& graph,
                                       std::span<const std::int64_t> load, planner::Assignment& assignment)>;

struct FreePolicy {
  std::string_view name;
  Split split = Split::kEqual;
  // Experts of each rank in one layer: [placement][rank][slot], with one placement for the step or one per micro-step.
  // Every expert occurs at least once; kNoExpert is an empty slot. `load` is the layer's layer_load().
  std::function<Array<ExpertId, 3>(LayerId layer, ArrayView<const std::int64_t, 2> load)> place;
  // If set, replaces `split`. Called once per layer; the result splits that layer's micro-steps in ascending order.
  std::function<SplitTokens(LayerId layer)> own_split = {};
  // kFree or kResident. kResident needs one placement for the whole step, with every expert at its home.
  Residency residency = Residency::kFree;
  // [layer], set by place(): CPU seconds spent once per step. If empty, all of place()'s time counts as once per step
  // if one placement serves several micro-steps. Otherwise no time does.
  std::span<const double> once_cpu_seconds = {};
};

// Returns Skipped if R does not divide E, or if residency is `free` and more than one micro-step is in flight. The
// order of events then has backward events, but an expert away from its home has no backward pass. Planning time counts
// as planning_cpu_seconds, except place()'s once-per-step part.
PolicyResult plan_freely(const FreePolicy& policy, const PolicyInput& input, ThreadPool& pool);

// Shares. The plan has residency `shared`: guests are fetched again for every use.
//
// Slots. Home experts take the home slots. The guests of an event, experts ascending, take a rank's guest slots in
// ascending order. A guest that its rank also had at the previous event keeps its slot.
// Tokens. A guest serves its share; the home serves the rest.
// In flight. Both passes of a micro-step have the same guests and quotas.

// Load of one layer in one micro-step, the input of a policy that plans each such pair separately.
struct LayerLoad {
  MicroStepId micro_step;
  LayerId layer;
  ArrayView<const Tokens, 2> by_source;     // [source rank][expert]
  std::span<const std::int64_t> of_expert;  // [expert], tokens summed over source ranks
  std::span<const RankId> home;             // [expert]
  Topology topology;
  int guest_slots = 0;  // per rank
};

// Compute each rank's home load and home experts. Both overwrite the vector, so a policy can reuse it.
void count_at_home(const LayerLoad& load, std::vector<std::int64_t>& tokens);           // [rank], of its home experts
void list_at_home(const LayerLoad& load, std::vector<std::vector<ExpertId>>& experts);  // [rank], ascending

// Tokens of one expert served by one rank other than its home.
struct Share {
  ExpertId expert;
  RankId rank;
  std::int64_t tokens = 0;  // ≥ 1; the shares of an expert sum to at most its load

  friend bool operator==(const Share&, const Share&) = default;
};

// Appends a micro-step's shares, in any order: each (expert, rank) at most once, at most guest_slots per rank.
using ChooseShares = std::function<void(const LayerLoad& load, std::vector<Share>& shares)>;

struct FetchedPolicy {
  std::string_view name;
  // Called once per layer, from several threads. Its result is called for that layer's micro-steps in ascending order.
  std::function<ChooseShares(LayerId layer)> of_layer;
  // [layer][expert], E/R experts per rank. Replaces the input's homes; changes count as home moves. Empty: no change.
  ArrayView<const RankId, 2> home = {};
};

// Returns Skipped if R does not divide E.
PolicyResult plan_fetched(const FetchedPolicy& policy, const PolicyInput& input, ThreadPool& pool);

}  // namespace foremoe
