#pragma once

// From what a policy decides to a plan. A policy chooses either a placement (what every rank holds, plan_freely) or
// shares (which tokens leave home, plan_fetched); slots, quotas and bounds follow here, the same way for all.
//
// Whatever else the options ask for (budgets, preferences, stages) is not observed, and the plan does not record it.

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/planner/token_assignment.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

// What policies ask of an input.

// Throws InputError for an option out of its range and for homes of another shape than the load.
void check_policy_input(const PolicyInput& input);

// The former step's load, or nullptr. Throws InputError naming it when it is of another model.
const LoadTable* former_load(const PolicyInput& input);

// The former step's plan if `policy` made it for as many layers, ranks, experts and guest slots; otherwise nullptr.
const StepPlan* former_plan(const PolicyInput& input, std::string_view policy);

// What the plan ends with: [rank][slot]. It has an event, as former_plan() makes sure.
Array<ExpertId, 2> last_placement(const StepPlan& plan, LayerId layer);

// [micro_step][expert], tokens of one layer: sources are added together.
Array<std::int64_t, 2> layer_load(const LoadTable& load, LayerId layer);

// Adds micro-steps first, …, first + count − 1 of [micro_step][expert], tokens: [expert].
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load, std::size_t first,
                                               std::size_t count);
std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load);

// All slots empty, no tokens, loads and bounds 0; homes those of the input. R divides E. Recorded options are guest
// slots, residency and in-flight.
StepPlan empty_plan(std::string_view policy, Residency residency, const PolicyInput& input);

// Runs `plan_layer` for every layer of the plan, from several threads. All of it counts as planning_cpu_seconds.
PlannedStep plan_layers(StepPlan plan, ThreadPool& pool,
                        const std::function<void(LayerId layer, StepPlan& plan)>& plan_layer);

// Placements. The plan is of residency `free`. Policies that leave the homes where they are and never change the guests
// inside a step get one of residency `resident`, for any number of micro-steps in flight.
//
// Slots. Replicas of one expert on one rank are one replica that serves their parts together; the slots that this
// frees stay empty. An expert that stays on a rank from one event to the next keeps its slot, newcomers take the lowest
// free slots, ascending. Before the first event there are homes in their slots.
//
// Tokens, by the split:
//   equal   every replica, counted before they are merged, serves the same whole number of tokens, and of the
//           remainder one more each those on the lowest ranks. Published systems route at random or in turn, so equal
//           parts in the mean; that they are equal in every micro-step, and who has the remainder, is our reading.
//   exact   the least largest rank load that these replicas permit (planner/token_assignment.h);
//   or as the policy itself splits them.
//
// Homes stay as given: they say who owns an expert, not who serves it.
enum class Split : std::uint8_t { kEqual, kExact };

// Fills `assignment` with quotas of micro-step m on the replicas in `graph`, whose slots are those of the plan. `load`
// is [expert], tokens; the quotas of an expert's slots sum to its load.
using SplitTokens = std::function<void(MicroStepId m, const planner::ReplicaGraph& graph,
                                       std::span<const std::int64_t> load, planner::Assignment& assignment)>;

struct FreePolicy {
  std::string_view name;
  Split split = Split::kEqual;
  // What the ranks are to hold in one layer: [placement][rank][slot], with one placement for the whole step or one per
  // micro-step. Every expert is in it at least once; kNoExpert is an empty slot. `load` is the layer's layer_load.
  std::function<Array<ExpertId, 3>(LayerId layer, ArrayView<const std::int64_t, 2> load)> place;
  // In place of `split`, where given: called once per layer for what then splits its micro-steps, ascending.
  std::function<SplitTokens(LayerId layer)> own_split = {};
  // kFree, or kResident: then there is one placement for the whole step, with every expert at its home.
  Residency residency = Residency::kFree;
  // [layer], set by place(): what of its CPU time is spent once per step. Empty: all of it where one placement serves
  // several micro-steps, else none.
  std::span<const double> once_cpu_seconds = {};
};

// Skipped when residency is free and there are backward events (an expert away from its home has no backward pass), or
// when homes and guest slots are not equally many on every rank. All of the planning counts as planning_cpu_seconds,
// but what place() does once per step.
PolicyResult plan_freely(const FreePolicy& policy, const PolicyInput& input, ThreadPool& pool);

// Shares. The plan is of residency `shared`: guests are fetched anew at every use.
//
// Slots. Homes in their slots; the guests of an event, experts ascending, in a rank's guest slots, ascending. "An
// expert that stays keeps its slot" holds among guests too: one that its rank had at the event before keeps that slot.
// Tokens. A guest serves what the policy says, the home what remains.
// In flight. Both passes of a micro-step have the same guests and quotas.

// One layer of one micro-step, as a policy that plans it alone sees it.
struct LayerLoad {
  MicroStepId micro_step;
  LayerId layer;
  ArrayView<const Tokens, 2> by_source;     // [source rank][expert]
  std::span<const std::int64_t> of_expert;  // [expert], tokens: sources added together
  std::span<const RankId> home;             // [expert]
  Topology topology;
  int guest_slots = 0;  // per rank
};

// What the ranks have before anything is fetched, into vectors that a policy may keep from micro-step to micro-step.
void count_at_home(const LayerLoad& load, std::vector<std::int64_t>& tokens);           // [rank], of its experts
void list_at_home(const LayerLoad& load, std::vector<std::vector<ExpertId>>& experts);  // [rank], ascending

// Tokens of an expert that a rank other than its home serves.
struct Share {
  ExpertId expert;
  RankId rank;
  std::int64_t tokens = 0;  // ≥ 1; the shares of an expert sum to its load at most

  friend bool operator==(const Share&, const Share&) = default;
};

// Appends a micro-step's shares: each (expert, rank) at most once, at most guest_slots on a rank, in any order.
using ChooseShares = std::function<void(const LayerLoad& load, std::vector<Share>& shares)>;

struct FetchedPolicy {
  std::string_view name;
  // Called once per layer, from several threads; what it returns sees that layer's micro-steps, ascending.
  std::function<ChooseShares(LayerId layer)> of_layer;
  // Homes in place of those of the input, which then count as moves: [layer][expert], E/R on each rank. Empty: those.
  ArrayView<const RankId, 2> home = {};
};

// Skipped when R does not divide E.
PolicyResult plan_fetched(const FetchedPolicy& policy, const PolicyInput& input, ThreadPool& pool);

}  // namespace foremoe
