#include "foremoe/planner/relocation.h"

#include <algorithm>

namespace foremoe::planner {

namespace {

// Returns a free guest slot of `rank`, an empty one if possible, or −1.
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
  std::int64_t highest = 0;  // larger load of the two ranks after the move
};

}  // namespace

std::vector<char> relocate_experts(const LayerProblem& p, int m, CopyLedger& ledger, ReplicaGraph& graph,
                                   Assignment& a) {
  std::vector<char> rests(p.num_experts, 0);
  const auto load = p.load(m);
  for (;;) {
    const auto busiest = std::max_element(a.rank_load.begin(), a.rank_load.end());
    const int from = static_cast<int>(busiest - a.rank_load.begin());
    if (*busiest <= p.target[m]) return rests;
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
    if (best.expert < 0) return rests;
    if (graph.expert_in(best.slot) != best.expert) ledger.replace(graph, best.slot, best.expert);
    const int home_slot = p.home_slot[best.expert];
    a.quota[home_slot] = 0;
    a.quota[best.slot] = load[best.expert];
    a.rank_load[from] -= load[best.expert];
    a.rank_load[graph.rank_of(best.slot)] += load[best.expert];
    rests[best.expert] = 1;
  }
}

namespace {

constexpr int kPairsTried = 8;  // pairs tried per exchange

struct Pair {
  std::int64_t promise;  // tokens
  int heavy;             // expert anchored in S
  int light;             // expert anchored outside S
};

void swap_anchors(LayerProblem& p, ReplicaGraph& graph, int e, int f) {
  graph.drop(p.home_slot[e]);
  graph.drop(p.home_slot[f]);
  std::swap(p.home_slot[e], p.home_slot[f]);
  std::swap(p.home[e], p.home[f]);
  graph.put(p.home_slot[e], e);
  graph.put(p.home_slot[f], f);
}

std::vector<Pair> promising_pairs(const LayerProblem& p, const ReplicaGraph& graph, const Assignment& a,
                                  const AssignmentSearch& search, std::int64_t target) {
  std::vector<Pair> pairs;
  for (int e = 0; e < p.num_experts; ++e) {
    const std::int64_t excess = a.rank_load[p.home[e]] - target;
    if (excess <= 0) continue;
    for (int f = 0; f < p.num_experts; ++f) {
      const int to = p.home[f];
      if (search.in_closed_set(to) || graph.find(e, to) >= 0 || graph.find(f, p.home[e]) >= 0) continue;
      const std::int64_t promise =
          std::min({a.quota[p.home_slot[e]] - a.quota[p.home_slot[f]], excess, target - a.rank_load[to]});
      if (promise > 0) pairs.push_back({promise, e, f});
    }
  }
  const auto count = std::min<std::size_t>(kPairsTried, pairs.size());
  std::partial_sort(pairs.begin(), pairs.begin() + static_cast<std::ptrdiff_t>(count), pairs.end(),
                    [](const Pair& x, const Pair& y) {
                      if (x.promise != y.promise) return x.promise > y.promise;
                      return x.heavy != y.heavy ? x.heavy < y.heavy : x.light < y.light;
                    });
  pairs.resize(count);
  return pairs;
}

}  // namespace

bool exchange_anchors(LayerProblem& p, int m, ReplicaGraph& graph, Assignment& a, AssignmentSearch& search) {
  const std::int64_t target = p.target[m];
  bool changed = false;
  for (int i = 0; i < p.num_ranks(); ++i) {
    serve_at_homes(p, m, a);
    const std::int64_t excess = search.relieve(graph, target, a);
    if (excess == 0) break;
    std::int64_t least = excess;
    Pair best{};
    for (const Pair& pair : promising_pairs(p, graph, a, search, target)) {
      swap_anchors(p, graph, pair.heavy, pair.light);
      Assignment trial;
      serve_at_homes(p, m, trial);
      const std::int64_t left = search.relieve(graph, target, trial);
      swap_anchors(p, graph, pair.heavy, pair.light);
      if (left >= least) continue;
      least = left;
      best = pair;
    }
    if (least == excess) break;
    swap_anchors(p, graph, best.heavy, best.light);
    changed = true;
  }
  serve_at_homes(p, m, a);
  search.relieve(graph, target, a);
  return changed;
}

}  // namespace foremoe::planner
