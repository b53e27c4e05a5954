#include "foremoe/planner/quotas.h"

#include <algorithm>
#include <cstdlib>

namespace foremoe::planner {

static constexpr int kPasses = 3;  // passes of NodeLocality

static void give(const ReplicaGraph& graph, Assignment& a, int slot, std::int64_t tokens) {
  a.quota[slot] += tokens;
  a.rank_load[graph.rank_of(slot)] += tokens;
}

static void reset(const ReplicaGraph& graph, Assignment& a) {
  a.quota.assign(graph.num_slots(), 0);
  a.rank_load.assign(graph.num_ranks(), 0);
}

void Quotas::serve_at_anchors(int m, const ReplicaGraph& graph, Assignment& a) const {
  reset(graph, a);
  for (int e = 0; e < graph.num_experts(); ++e) give(graph, a, anchor_[e], problem_.load(m)[e]);
}

void Quotas::deal_by_node(int m, const ReplicaGraph& graph, Assignment& a) const {
  reset(graph, a);
  for (int e = 0; e < graph.num_experts(); ++e) {
    if (graph.num_holders(e) < 2) give(graph, a, anchor_[e], problem_.load(m)[e]);
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
      give(graph, a, best, supply[n]);
      left -= supply[n];
    }
    give(graph, a, anchor_[e], left);
  }
}

bool Quotas::drop_smallest_guest(ReplicaGraph& graph, const Assignment& a) const {
  int smallest = -1;
  for (int s = 0; s < graph.num_slots(); ++s) {
    const int e = graph.expert_in(s);
    if (e < 0 || s == anchor_[e] || a.quota[s] == 0 || a.quota[s] >= options_.min_tokens_per_guest) continue;
    if (smallest < 0 || a.quota[s] < a.quota[smallest]) smallest = s;
  }
  if (smallest >= 0) graph.drop(smallest);
  return smallest >= 0;
}

std::int64_t Quotas::exact(int m, ReplicaGraph& graph, Assignment& a) {
  const bool many_nodes = problem_.topology.num_nodes() > 1;
  for (;;) {
    serve_at_anchors(m, graph, a);
    std::int64_t level = assign_tokens(graph, problem_.lower_bound[m], a, search_);
    if (many_nodes) {
      if (preference(options_) != Prefer::kBalance) level = std::max(level, problem_.target[m]);
      deal_by_node(m, graph, a);
      search_.relieve(graph, level, a);
      locality_.improve(m, level, graph, a);
    }
    if (options_.min_tokens_per_guest == 0 || !drop_smallest_guest(graph, a)) break;
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

std::int64_t Quotas::equal(int m, ReplicaGraph& graph, const std::vector<char>& rests, Assignment& a) {
  const auto parts_of = [&](int slot) {
    const int e = graph.expert_in(slot);
    return rests[e] && graph.num_holders(e) > 1 && slot == anchor_[e] ? 0 : 1;
  };
  split_equally(graph, problem_.load(m), parts_of, a);
  while (options_.min_tokens_per_guest > 0 && drop_smallest_guest(graph, a)) {
    split_equally(graph, problem_.load(m), parts_of, a);
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

NodeLocality::NodeLocality(const LayerProblem& problem)
    : problem_(problem),
      queue_(problem.num_ranks()),
      leaving_(problem.num_ranks()),
      arriving_(problem.num_ranks()),
      visited_(problem.num_ranks()) {}

std::size_t NodeLocality::node_of(const ReplicaGraph& graph, int slot) const {
  return problem_.topology.node_of(RankId{graph.rank_of(slot)}).index();
}

std::int64_t NodeLocality::received(int expert, std::size_t node) const {
  return node_quota_(expert, node) - problem_.node_load(m_, expert, node);
}

void NodeLocality::shift(int s, int t, std::int64_t tokens, const ReplicaGraph& graph, Assignment& a) {
  const int e = graph.expert_in(s);
  a.quota[s] -= tokens;
  a.quota[t] += tokens;
  a.rank_load[graph.rank_of(s)] -= tokens;
  a.rank_load[graph.rank_of(t)] += tokens;
  node_quota_(e, node_of(graph, s)) -= tokens;
  node_quota_(e, node_of(graph, t)) += tokens;
}

// Finds a path from rank `from` to `source` or to a rank below the level. No move on the path increases the number of
// tokens that leave their node.
bool NodeLocality::find_outlet(std::int64_t level, int from, int source, const ReplicaGraph& graph,
                               const Assignment& a) {
  std::fill(visited_.begin(), visited_.end(), 0);
  int tail = 0;
  queue_[tail++] = from;
  visited_[from] = 1;
  leaving_[from] = -1;
  for (int head = 0; head < tail; ++head) {
    const int r = queue_[head];
    if (r != from && (r == source || a.rank_load[r] < level)) {
      outlet_ = r;
      return true;
    }
    for (int s = graph.first_slot(r); s < graph.first_slot(r + 1); ++s) {
      const int e = graph.expert_in(s);
      if (e < 0 || a.quota[s] == 0 || graph.num_holders(e) < 2) continue;
      const std::size_t node = node_of(graph, s);
      const bool foreign = received(e, node) > 0;
      for (int t = graph.first_holder(e); t >= 0; t = graph.next_holder(t)) {
        const int to = graph.rank_of(t);
        if (visited_[to] != 0) continue;
        const std::size_t there = node_of(graph, t);
        if (there != node && !foreign) continue;
        visited_[to] = 1;
        leaving_[to] = s;
        arriving_[to] = t;
        queue_[tail++] = to;
      }
    }
  }
  return false;
}

// Moves tokens of an expert from slot s, on a node that receives some, to slot t, on a node that sends some away.
bool NodeLocality::move(std::int64_t level, int s, int t, const ReplicaGraph& graph, Assignment& a) {
  const int e = graph.expert_in(s);
  std::int64_t tokens = std::min({received(e, node_of(graph, s)), -received(e, node_of(graph, t)), a.quota[s]});
  if (tokens <= 0) return false;
  const int from = graph.rank_of(s);
  const int to = graph.rank_of(t);
  const std::int64_t room = level - a.rank_load[to];
  if (room > 0) {
    shift(s, t, std::min(tokens, room), graph, a);
    return true;
  }
  if (!find_outlet(level, to, from, graph, a)) return false;
  if (outlet_ != from) tokens = std::min(tokens, level - a.rank_load[outlet_]);
  for (int r = outlet_; r != to; r = graph.rank_of(leaving_[r])) {
    const int out = leaving_[r];
    const int expert = graph.expert_in(out);
    tokens = std::min(tokens, a.quota[out]);
    if (node_of(graph, out) != node_of(graph, arriving_[r])) {
      tokens = std::min(tokens, received(expert, node_of(graph, out)));
    }
  }
  if (tokens <= 0) return false;
  shift(s, t, tokens, graph, a);
  for (int r = outlet_; r != to; r = graph.rank_of(leaving_[r])) shift(leaving_[r], arriving_[r], tokens, graph, a);
  return true;
}

void NodeLocality::improve(int m, std::int64_t level, const ReplicaGraph& graph, Assignment& a) {
  m_ = m;
  node_quota_ = Array<std::int64_t, 2>(
      {static_cast<std::size_t>(problem_.num_experts), static_cast<std::size_t>(problem_.topology.num_nodes())});
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) >= 0) node_quota_(graph.expert_in(s), node_of(graph, s)) += a.quota[s];
  }
  const std::int64_t before = busiest_link();
  before_ = a;
  for (int pass = 0; pass < kPasses; ++pass) {
    bool moved = false;
    for (int s = 0; s < graph.num_slots(); ++s) {
      const int e = graph.expert_in(s);
      if (e < 0 || graph.num_holders(e) < 2) continue;
      for (int t = graph.first_holder(e); t >= 0; t = graph.next_holder(t)) {
        if (node_of(graph, t) != node_of(graph, s) && move(level, s, t, graph, a)) moved = true;
      }
    }
    if (!moved) break;
  }
  if (busiest_link() > before) std::swap(a, before_);
}

// Maximum number of tokens that a node sends or receives.
std::int64_t NodeLocality::busiest_link() const {
  std::int64_t busiest = 0;
  for (std::size_t n = 0; n < node_quota_.extent(1); ++n) {
    std::int64_t in = 0;
    std::int64_t out = 0;
    for (int e = 0; e < problem_.num_experts; ++e) {
      const std::int64_t tokens = received(e, n);
      (tokens > 0 ? in : out) += std::abs(tokens);
    }
    busiest = std::max({busiest, in, out});
  }
  return busiest;
}

}  // namespace foremoe::planner
