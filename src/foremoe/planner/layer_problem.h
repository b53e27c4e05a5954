#pragma once

// Input of all stages: one layer of a step.
//
// Shares. To compare micro-steps of different size, tokens are divided by their micro-step's mean rank load. These
// float values are called "shares of a mean rank load". Values written to a plan are integers.

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
  // [micro_step][expert][node], tokens by source node; empty if there is only one node.
  Array<std::int64_t, 3> node_load;
  std::vector<std::int64_t> lower_bound;  // [micro_step], ⌈mean⌉
  std::vector<std::int64_t> target;       // [micro_step], rank load that counts as balanced
  std::vector<float> per_mean;            // [micro_step], 1 / mean rank load; 0 without load

  // Upper bounds on the load that one guest can move from its home: the home's excess and the guest rank's room.
  Array<float, 2> surplus;  // [micro_step][expert], min(load, excess of its home), shares
  Array<float, 2> room;     // [micro_step][rank], shares

  int num_ranks() const { return topology.num_ranks; }
  int homes_per_rank() const { return num_experts / topology.num_ranks; }
  int slots_per_rank() const { return homes_per_rank() + guest_slots; }
  std::span<const std::int64_t> load(int m) const { return expert_load.row(m); }
};

// Reads layer `layer` of the table. `home` is [expert], with E/R experts on each rank.
LayerProblem make_layer_problem(const LoadTable& table, LayerId layer, std::span<const RankId> home,
                                const PlannerOptions& options);

// Sets the homes and recomputes all fields that depend on them.
void set_homes(LayerProblem& problem, std::span<const int> home);

// Returns a graph with every expert in its home slot (ascending per rank) and empty guest slots.
ReplicaGraph homes_only(const LayerProblem& problem);

// Assigns all tokens of micro-step m to homes, the starting point of every stage.
void serve_at_homes(const LayerProblem& problem, int m, Assignment& assignment);

// Moves a guest's tokens back to the home of its expert.
void release(const LayerProblem& problem, const ReplicaGraph& graph, int slot, Assignment& assignment);

}  // namespace foremoe::planner
