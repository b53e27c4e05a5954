#include "foremoe/planner/exchange.h"

#include <algorithm>

namespace foremoe::planner {

namespace {

constexpr int kTrials = 8;  // pairs tried per exchange

struct Pair {
  std::int64_t promise;  // tokens
  int heavy;             // expert anchored in S
  int light;             // expert anchored outside
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
                                  const AssignmentWorkspace& w, std::int64_t target) {
  std::vector<Pair> pairs;
  for (int e = 0; e < p.num_experts; ++e) {
    const std::int64_t excess = a.rank_load[p.home[e]] - target;
    if (excess <= 0) continue;
    for (int f = 0; f < p.num_experts; ++f) {
      const int to = p.home[f];
      if (w.in_closed_set(to) || graph.find(e, to) >= 0 || graph.find(f, p.home[e]) >= 0) continue;
      const std::int64_t promise =
          std::min({a.quota[p.home_slot[e]] - a.quota[p.home_slot[f]], excess, target - a.rank_load[to]});
      if (promise > 0) pairs.push_back({promise, e, f});
    }
  }
  const auto count = std::min<std::size_t>(kTrials, pairs.size());
  std::partial_sort(pairs.begin(), pairs.begin() + static_cast<std::ptrdiff_t>(count), pairs.end(),
                    [](const Pair& x, const Pair& y) {
                      if (x.promise != y.promise) return x.promise > y.promise;
                      return x.heavy != y.heavy ? x.heavy < y.heavy : x.light < y.light;
                    });
  pairs.resize(count);
  return pairs;
}

}  // namespace

bool exchange_anchors(LayerProblem& p, int m, ReplicaGraph& graph, Assignment& a, AssignmentWorkspace& w) {
  const std::int64_t target = p.target[m];
  bool changed = false;
  for (int i = 0; i < p.num_ranks(); ++i) {
    serve_at_homes(p, m, a);
    const std::int64_t excess = relieve(graph, target, a, w);
    if (excess == 0) break;
    std::int64_t least = excess;
    Pair best{};
    for (const Pair& pair : promising_pairs(p, graph, a, w, target)) {
      swap_anchors(p, graph, pair.heavy, pair.light);
      Assignment trial;
      serve_at_homes(p, m, trial);
      const std::int64_t left = relieve(graph, target, trial, w);
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
  relieve(graph, target, a, w);
  return changed;
}

}  // namespace foremoe::planner
