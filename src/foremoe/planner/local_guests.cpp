#include "foremoe/planner/local_guests.h"

#include <algorithm>
#include <numeric>

namespace foremoe::planner {

// Tokens that a renewed guest must keep on its node beyond what the old one kept, in mean rank loads.
constexpr float kWorthACopy = 0.1F;

static bool held_on(const LayerProblem& p, const ReplicaGraph& graph, int expert, NodeId node) {
  for (int s = graph.first_holder(expert); s >= 0; s = graph.next_holder(s)) {
    if (p.topology.node_of(RankId{graph.rank_of(s)}) == node) return true;
  }
  return false;
}

// [expert], what the node's ranks send to experts that it does not hold, over all micro-steps, in mean rank loads.
static std::vector<float> missing_on_node(const LayerProblem& p, const ReplicaGraph& graph, NodeId node) {
  std::vector<float> missing(p.num_experts, 0.0F);
  for (int e = 0; e < p.num_experts; ++e) {
    for (int m = 0; m < p.num_micro_steps && !held_on(p, graph, e, node); ++m) {
      missing[e] += static_cast<float>(p.node_load(m, e, node)) * p.per_mean[m];
    }
  }
  return missing;
}

// [rank], load of its homes over all micro-steps, in mean rank loads.
static std::vector<float> home_loads(const LayerProblem& p) {
  std::vector<float> load(p.num_ranks(), 0.0F);
  for (int m = 0; m < p.num_micro_steps; ++m) {
    for (int e = 0; e < p.num_experts; ++e) load[p.home[e]] += static_cast<float>(p.load(m)[e]) * p.per_mean[m];
  }
  return load;
}

void add_local_guests(const LayerProblem& p, ReplicaGraph& graph) {
  if (p.topology.num_nodes() == 1) return;
  const auto load = home_loads(p);
  for (int n = 0; n < p.topology.num_nodes(); ++n) {
    std::vector<int> free_slots;
    const RankRange ranks = p.topology.ranks_of(NodeId{n});
    for (int s = graph.first_slot(ranks.first); s < graph.first_slot(ranks.last); ++s) {
      if (graph.expert_in(s) < 0) free_slots.push_back(s);
    }
    std::stable_sort(free_slots.begin(), free_slots.end(),
                     [&](int x, int y) { return load[graph.rank_of(x)] < load[graph.rank_of(y)]; });
    const auto missing = missing_on_node(p, graph, NodeId{n});
    std::vector<int> experts(p.num_experts);
    std::iota(experts.begin(), experts.end(), 0);
    std::stable_sort(experts.begin(), experts.end(), [&](int x, int y) { return missing[x] > missing[y]; });
    for (std::size_t i = 0; i < std::min(free_slots.size(), experts.size()) && missing[experts[i]] > 0; ++i) {
      graph.put(free_slots[i], experts[i]);
    }
  }
}

void renew_local_guests(const LayerProblem& p, int m, const Assignment& a, ReplicaGraph& graph) {
  if (p.topology.num_nodes() == 1) return;
  for (int n = 0; n < p.topology.num_nodes(); ++n) {
    const RankRange ranks = p.topology.ranks_of(NodeId{n});
    std::vector<int> slots;
    for (int r = ranks.first; r < ranks.last; ++r) {
      for (int s = graph.first_slot(r + 1) - p.guest_slots; s < graph.first_slot(r + 1); ++s) {
        if (a.quota[s] == 0) slots.push_back(s);
      }
    }
    const auto kept = [&](int slot) {
      return graph.expert_in(slot) < 0 ? 0 : p.node_load(m, graph.expert_in(slot), n);
    };
    std::stable_sort(slots.begin(), slots.end(), [&](int x, int y) { return kept(x) < kept(y); });
    std::vector<int> missing;
    for (int e = 0; e < p.num_experts; ++e) {
      if (!held_on(p, graph, e, NodeId{n})) missing.push_back(e);
    }
    std::stable_sort(missing.begin(), missing.end(),
                     [&](int x, int y) { return p.node_load(m, x, n) > p.node_load(m, y, n); });
    for (std::size_t i = 0; i < std::min(slots.size(), missing.size()); ++i) {
      const std::int64_t gain = p.node_load(m, missing[i], n) - kept(slots[i]);
      if (static_cast<float>(gain) * p.per_mean[m] < kWorthACopy) break;
      if (graph.expert_in(slots[i]) >= 0) graph.drop(slots[i]);
      graph.put(slots[i], missing[i]);
    }
  }
}

}  // namespace foremoe::planner
