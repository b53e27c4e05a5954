#pragma once

// One layer's part of a step, as the stages read it.
//
// Shares. Where micro-steps of different size are weighed against each other, tokens are divided by the mean rank load
// of their micro-step; such numbers are float "shares of a mean rank load". Whatever reaches a plan is integers.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/planner/planner_options.h"
#include "foremoe/planner/token_assignment.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe::planner {

struct LayerProblem {
  int num_micro_steps = 0;
  int num_experts = 0;
  int guest_slots = 0;
  Topology topology;
  std::vector<int> home;               // [expert], rank
  std::vector<int> home_slot;          // [expert], slot of its home
  Array<std::int64_t, 2> expert_load;  // [micro_step][expert], tokens
  // [micro_step][expert][node], tokens by the node of their source; empty on one node.
  Array<std::int64_t, 3> node_load;
  std::vector<std::int64_t> lower_bound;  // [micro_step], ⌈mean⌉
  std::vector<std::int64_t> target;       // [micro_step], a rank load at which it counts as balanced
  std::vector<float> per_mean;            // [micro_step], 1 / mean rank load; 0 without load

  // What a guest could relieve if it were the only one: a source's excess and a rank's room, at homes alone.
  Array<float, 2> surplus;  // [micro_step][expert], min(load, excess of its home), shares
  Array<float, 2> room;     // [micro_step][rank], shares

  int num_ranks() const { return topology.num_ranks; }
  int homes_per_rank() const { return num_experts / topology.num_ranks; }
  int slots_per_rank() const { return homes_per_rank() + guest_slots; }
  std::span<const std::int64_t> load(int m) const { return expert_load.row(m); }
};

// Reads layer `layer` of the table; `home` as [expert] ranks, E/R each.
LayerProblem make_layer_problem(const LoadTable& table, LayerId layer, std::span<const RankId> home,
                                const PlannerOptions& options);

// Recomputes what depends on the homes, after they moved.
void set_homes(LayerProblem& problem, std::span<const int> home);

// Homes in their slots, ascending experts, guest slots empty.
ReplicaGraph homes_only(const LayerProblem& problem);

// All of micro-step m at homes; where every stage starts.
void serve_at_homes(const LayerProblem& problem, int m, Assignment& assignment);

// The tokens of a guest go back to its home.
void release(const LayerProblem& problem, const ReplicaGraph& graph, int slot, Assignment& assignment);

}  // namespace foremoe::planner
