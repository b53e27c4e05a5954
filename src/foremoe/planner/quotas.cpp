#include "foremoe/planner/quotas.h"

#include <algorithm>

namespace foremoe::planner {

bool Quotas::drop_smallest_guest(ReplicaGraph& graph, const Assignment& a) const {
  int smallest = -1;
  for (int s = 0; s < graph.num_slots(); ++s) {
    const int e = graph.expert_in(s);
    if (e < 0 || s == problem_.home_slot[e] || a.quota[s] == 0 || a.quota[s] >= options_.min_tokens_per_guest) continue;
    if (smallest < 0 || a.quota[s] < a.quota[smallest]) smallest = s;
  }
  if (smallest >= 0) graph.drop(smallest);
  return smallest >= 0;
}

std::int64_t Quotas::exact(int m, ReplicaGraph& graph, Assignment& a) {
  const bool many_nodes = problem_.topology.num_nodes() > 1;
  for (;;) {
    serve_at_homes(problem_, m, a);
    std::int64_t level = assign_tokens(graph, problem_.lower_bound[m], a, workspace_);
    if (many_nodes) {
      if (options_.prefer == Prefer::kLinks) level = std::max(level, problem_.target[m]);
      deal_by_node(m, graph, a);
      relieve(graph, level, a, workspace_);
      keep_on_node(m, level, graph, a);
    }
    if (options_.min_tokens_per_guest == 0 || !drop_smallest_guest(graph, a)) break;
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

// Every node's tokens to the replicas on the node, the least loaded rank first; what has none there to the home.
void Quotas::deal_by_node(int m, const ReplicaGraph& graph, Assignment& a) {
  std::fill(a.quota.begin(), a.quota.end(), 0);
  std::fill(a.rank_load.begin(), a.rank_load.end(), 0);
  const auto give = [&](int slot, std::int64_t tokens) {
    a.quota[slot] += tokens;
    a.rank_load[graph.rank_of(slot)] += tokens;
  };
  for (int e = 0; e < graph.num_experts(); ++e) {
    if (graph.num_holders(e) < 2) give(problem_.home_slot[e], problem_.load(m)[e]);
  }
  for (int e = 0; e < graph.num_experts(); ++e) {
    if (graph.num_holders(e) < 2) continue;
    std::int64_t left = problem_.load(m)[e];
    const auto supply = problem_.node_load.row(m, e);
    for (int n = 0; n < problem_.topology.num_nodes(); ++n) {
      int best = -1;
      for (int s = graph.first_holder(e); s >= 0; s = graph.next_holder(s)) {
        const int r = graph.rank_of(s);
        if (problem_.topology.node_of(RankId{r}).value != n) continue;
        if (best < 0 || a.rank_load[r] < a.rank_load[graph.rank_of(best)]) best = s;
      }
      if (best < 0) continue;
      give(best, supply[n]);
      left -= supply[n];
    }
    give(problem_.home_slot[e], left);
  }
}

void Quotas::keep_on_node(int m, std::int64_t level, const ReplicaGraph& graph, Assignment& a) {
  const int num_nodes = problem_.topology.num_nodes();
  const auto node_of = [&](int slot) { return problem_.topology.node_of(RankId{graph.rank_of(slot)}).index(); };
  node_quota_ =
      Array<std::int64_t, 2>({static_cast<std::size_t>(problem_.num_experts), static_cast<std::size_t>(num_nodes)});
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) >= 0) node_quota_(graph.expert_in(s), node_of(s)) += a.quota[s];
  }
  // Moves tokens of an expert that its node did not send to a replica on a node that sends some away: both links are
  // relieved.
  for (int s = 0; s < graph.num_slots(); ++s) {
    const int e = graph.expert_in(s);
    if (e < 0 || graph.num_holders(e) < 2 || a.quota[s] == 0) continue;
    const auto supply = problem_.node_load.row(m, e);
    const auto from = node_of(s);
    for (int t = graph.first_holder(e); t >= 0; t = graph.next_holder(t)) {
      const auto to = node_of(t);
      if (to == from) continue;
      const std::int64_t foreign = node_quota_(e, from) - supply[from];
      const std::int64_t missing = supply[to] - node_quota_(e, to);
      const std::int64_t room = level - a.rank_load[graph.rank_of(t)];
      const std::int64_t tokens = std::min({foreign, missing, room, a.quota[s]});
      if (tokens <= 0) continue;
      a.quota[s] -= tokens;
      a.quota[t] += tokens;
      a.rank_load[graph.rank_of(s)] -= tokens;
      a.rank_load[graph.rank_of(t)] += tokens;
      node_quota_(e, from) -= tokens;
      node_quota_(e, to) += tokens;
    }
  }
}

std::int64_t Quotas::equal(int m, const ReplicaGraph& graph, const std::vector<char>& rests, Assignment& a) {
  a.quota.assign(graph.num_slots(), 0);
  a.rank_load.assign(graph.num_ranks(), 0);
  for (int e = 0; e < graph.num_experts(); ++e) {
    std::vector<int> slots;
    for (int s = graph.first_holder(e); s >= 0; s = graph.next_holder(s)) slots.push_back(s);
    if (rests[e] && slots.size() > 1) std::erase(slots, problem_.home_slot[e]);
    std::sort(slots.begin(), slots.end());  // by rank
    const auto n = static_cast<std::int64_t>(slots.size());
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t tokens = problem_.load(m)[e] / n + (i < problem_.load(m)[e] % n ? 1 : 0);
      a.quota[slots[i]] = tokens;
      a.rank_load[graph.rank_of(slots[i])] += tokens;
    }
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

}  // namespace foremoe::planner
