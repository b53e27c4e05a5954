#include "foremoe/planner/relocation.h"

#include <algorithm>

namespace foremoe::planner {

namespace {

// The guest slot of `rank` to fill, or −1: an empty one first.
int spare_slot(const LayerProblem& p, const ReplicaGraph& graph, const Assignment& a, int rank) {
  int spare = -1;
  const int end = graph.first_slot(rank) + graph.slots_per_rank();
  for (int s = end - p.guest_slots; s < end; ++s) {
    if (graph.expert_in(s) < 0) return s;
    if (a.quota[s] == 0 && spare < 0) spare = s;
  }
  return spare;
}

struct Move {
  int expert = -1;
  int slot = -1;
  std::int64_t highest = 0;  // larger load of the two ranks afterwards
};

}  // namespace

void relocate_experts(const LayerProblem& p, int m, CopyLedger& ledger, ReplicaGraph& graph, Assignment& a,
                      std::vector<char>& rests) {
  const auto load = p.load(m);
  for (;;) {
    const auto busiest = std::max_element(a.rank_load.begin(), a.rank_load.end());
    const int from = static_cast<int>(busiest - a.rank_load.begin());
    if (*busiest <= p.target[m]) return;
    Move best{.highest = *busiest};
    for (int s = graph.first_slot(from); s < graph.first_slot(from) + p.homes_per_rank(); ++s) {
      const int e = graph.expert_in(s);
      if (e < 0 || s != p.home_slot[e] || load[e] == 0 || a.quota[s] != load[e]) continue;
      for (int to = 0; to < p.num_ranks(); ++to) {
        const std::int64_t highest = std::max(a.rank_load[from] - load[e], a.rank_load[to] + load[e]);
        if (highest >= best.highest) continue;
        int slot = graph.find(e, to);
        if (slot < 0) slot = spare_slot(p, graph, a, to);
        if (slot < 0 || (graph.expert_in(slot) != e && !ledger.permits(graph, slot, e))) continue;
        best = {.expert = e, .slot = slot, .highest = highest};
      }
    }
    if (best.expert < 0) return;
    if (graph.expert_in(best.slot) != best.expert) ledger.replace(graph, best.slot, best.expert);
    const int home_slot = p.home_slot[best.expert];
    a.quota[home_slot] = 0;
    a.quota[best.slot] = load[best.expert];
    a.rank_load[from] -= load[best.expert];
    a.rank_load[graph.rank_of(best.slot)] += load[best.expert];
    rests[best.expert] = 1;
  }
}

}  // namespace foremoe::planner
