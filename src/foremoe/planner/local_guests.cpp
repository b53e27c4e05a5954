#include "foremoe/planner/local_guests.h"

#include <algorithm>
#include <vector>

namespace foremoe::planner {

static bool held_on(const LayerProblem& p, const ReplicaGraph& graph, int expert, NodeId node) {
  for (int s = graph.first_holder(expert); s >= 0; s = graph.next_holder(s)) {
    if (p.topology.node_of(RankId{graph.rank_of(s)}) == node) return true;
  }
  return false;
}

LocalGuests::LocalGuests(const LayerProblem& problem, Prefer prefer) : problem_(problem) {
  const int num_nodes = problem.topology.num_nodes();
  if (prefer != Prefer::kLinks || num_nodes == 1) return;
  tokens_ = Array<float, 2>({static_cast<std::size_t>(problem.num_experts), static_cast<std::size_t>(num_nodes)});
  for (int m = 0; m < problem.num_micro_steps; ++m) {
    for (int e = 0; e < problem.num_experts; ++e) {
      for (int n = 0; n < num_nodes; ++n) {
        tokens_(e, n) += static_cast<float>(problem.node_load(m, e, n)) * problem.per_mean[m];
      }
    }
  }
}

float LocalGuests::tokens(const ReplicaGraph& graph, int expert, int rank) const {
  if (!count()) return 0;
  const NodeId node = problem_.topology.node_of(RankId{rank});
  return held_on(problem_, graph, expert, node) ? 0 : tokens_(expert, node);
}

void LocalGuests::add(float least, ReplicaGraph& graph) const {
  if (!count()) return;
  std::vector<float> load(problem_.num_ranks(), 0.0F);  // at homes, in mean rank loads
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    for (int e = 0; e < problem_.num_experts; ++e) {
      load[problem_.home[e]] += static_cast<float>(problem_.load(m)[e]) * problem_.per_mean[m];
    }
  }
  for (int n = 0; n < problem_.topology.num_nodes(); ++n) {
    const RankRange ranks = problem_.topology.ranks_of(NodeId{n});
    std::vector<int> slots;
    for (int s = graph.first_slot(ranks.first); s < graph.first_slot(ranks.last); ++s) {
      if (graph.expert_in(s) < 0) slots.push_back(s);
    }
    std::ranges::stable_sort(slots, {}, [&](int s) { return load[graph.rank_of(s)]; });
    std::vector<int> experts;
    for (int e = 0; e < problem_.num_experts; ++e) {
      if (tokens(graph, e, ranks.first) > least) experts.push_back(e);
    }
    std::ranges::stable_sort(experts, {}, [&](int e) { return -tokens_(e, n); });
    for (std::size_t i = 0; i < std::min(slots.size(), experts.size()); ++i) graph.put(slots[i], experts[i]);
  }
}

// A local guest is replaced only if the new one makes at least this many more tokens local, in mean rank loads.
constexpr float kWorthACopy = 0.1F;

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
