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
      deal_by_node(problem_, m, graph, a);
      relieve(graph, level, a, workspace_);
      locality_.improve(m, level, graph, a);
    }
    if (options_.min_tokens_per_guest == 0 || !drop_smallest_guest(graph, a)) break;
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

std::int64_t Quotas::equal(int m, ReplicaGraph& graph, const std::vector<char>& rests, Assignment& a) {
  split_equally(m, graph, rests, a);
  while (options_.min_tokens_per_guest > 0 && drop_smallest_guest(graph, a)) split_equally(m, graph, rests, a);
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

void Quotas::split_equally(int m, const ReplicaGraph& graph, const std::vector<char>& rests, Assignment& a) const {
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
}

}  // namespace foremoe::planner
