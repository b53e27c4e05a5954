#pragma once

// What policies that place freely have in common: from the experts that each rank is to hold in each micro-step to a
// plan of residency `free`. Policies that leave the homes where they are and never change the guests inside a step
// get a plan of residency `resident` from it, for any number of micro-steps in flight.
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
// Homes stay as given: they say who owns an expert, not who serves it. Budgets and preferences among the options
// are not observed, and the plan does not record them.

#include <functional>
#include <string_view>

#include "foremoe/planner/token_assignment.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

// [micro_step][expert], tokens of one layer: sources are added together.
Array<std::int64_t, 2> layer_load(const LoadTable& load, LayerId layer);

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
};

// Skipped when residency is free and there are backward events (an expert away from its home has no backward pass), or
// when homes and guest slots are not equally many on every rank. All of the planning counts as planning_cpu_seconds.
PolicyResult plan_freely(const FreePolicy& policy, const PolicyInput& input, ThreadPool& pool);

}  // namespace foremoe
