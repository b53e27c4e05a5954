#include "foremoe/planner/quotas.h"

#include <algorithm>

#include "foremoe/planner/equal_split.h"

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
  const auto parts_of = [&](int slot) {
    const int e = graph.expert_in(slot);
    return rests[e] && graph.num_holders(e) > 1 && slot == problem_.home_slot[e] ? 0 : 1;
  };
  split_equally(graph, problem_.load(m), parts_of, a);
  while (options_.min_tokens_per_guest > 0 && drop_smallest_guest(graph, a)) {
    split_equally(graph, problem_.load(m), parts_of, a);
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

}  // namespace foremoe::planner
