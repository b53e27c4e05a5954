#pragma once

// What policies that fetch guests anew at every use have in common: from the guests of each micro-step and what they
// serve to a plan of residency `shared`.
//
// Slots. Homes in their slots; the guests of an event, experts ascending, in a rank's guest slots, ascending. "An
// expert that stays keeps its slot" holds among guests too: one that its rank had at the event before keeps that slot.
// Tokens. A guest serves what the policy says, the home what remains.
// In flight. Both passes of a micro-step have the same guests and quotas.
//
// Budgets and preferences among the options are not observed, and the plan does not record them.

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "foremoe/policy/policy.h"

namespace foremoe {

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

// Skipped when R does not divide E. All of the planning counts as planning_cpu_seconds.
PolicyResult plan_fetched(const FetchedPolicy& policy, const PolicyInput& input, ThreadPool& pool);

}  // namespace foremoe
