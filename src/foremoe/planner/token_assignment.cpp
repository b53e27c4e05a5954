#include "foremoe/planner/token_assignment.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <numeric>
#include <utility>

namespace foremoe::planner {

static std::int64_t ceil_div(std::int64_t tokens, std::int64_t ranks) { return (tokens + ranks - 1) / ranks; }

static void clear_assignment(const ReplicaGraph& graph, Assignment& a) {
  a.quota.assign(graph.num_slots(), 0);
  a.rank_load.assign(graph.num_ranks(), 0);
}

static void move_tokens(const ReplicaGraph& graph, Assignment& a, int slot, std::int64_t tokens) {
  a.quota[slot] += tokens;
  a.rank_load[graph.rank_of(slot)] += tokens;
}

// Full check for debug builds: no quota is negative or in an empty slot, and rank loads are sums of quotas.
[[maybe_unused]] static bool adds_up(const ReplicaGraph& graph, const Assignment& a) {
  for (int r = 0; r < graph.num_ranks(); ++r) {
    std::int64_t load = 0;
    for (int s = graph.first_slot(r); s < graph.first_slot(r + 1); ++s) {
      if (a.quota[s] < 0 || (a.quota[s] > 0 && graph.expert_in(s) < 0)) return false;
      load += a.quota[s];
    }
    if (load != a.rank_load[r]) return false;
  }
  return true;
}

// Raises the holders of one expert to a common level (water-filling). Holders above the level receive no tokens.
static void fill_holders(const ReplicaGraph& graph, int expert, std::int64_t tokens, Assignment& a) {
  // Each pass excludes the holders above the level, which lowers it, until no holder is above it.
  std::int64_t level = std::numeric_limits<std::int64_t>::max();
  std::int64_t remainder = 0;
  for (int sharing = 0;;) {
    std::int64_t sum = tokens;
    int below = 0;
    for (int s = graph.first_holder(expert); s >= 0; s = graph.next_holder(s)) {
      const std::int64_t load = a.rank_load[graph.rank_of(s)];
      if (load > level) continue;
      sum += load;
      ++below;
    }
    if (below == sharing) break;
    sharing = below;
    level = sum / sharing;
    remainder = sum % sharing;
  }
  for (int s = graph.first_holder(expert); s >= 0; s = graph.next_holder(s)) {
    const std::int64_t load = a.rank_load[graph.rank_of(s)];
    if (load > level) continue;
    move_tokens(graph, a, s, level - load + (remainder > 0 ? 1 : 0));
    --remainder;
  }
}

void water_fill(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& a) {
  clear_assignment(graph, a);
  for (int e = 0; e < graph.num_experts(); ++e) {
    assert(graph.num_holders(e) > 0 || expert_load[e] == 0);
    if (graph.num_holders(e) == 1) move_tokens(graph, a, graph.first_holder(e), expert_load[e]);
  }
  const std::int64_t total = std::accumulate(expert_load.begin(), expert_load.end(), std::int64_t{0});
  const std::int64_t large = 4 * total / std::max(1, graph.num_experts());
  for (const bool first : {true, false}) {
    for (int e = 0; e < graph.num_experts(); ++e) {
      if ((expert_load[e] > large) != first || graph.num_holders(e) < 2) continue;
      fill_holders(graph, e, expert_load[e], a);
    }
  }
  assert(adds_up(graph, a));
}

std::int64_t AssignmentSearch::start(const ReplicaGraph& graph, std::int64_t target, const Assignment& a) {
  queue_.resize(graph.num_ranks());
  leaving_.resize(graph.num_ranks());
  arriving_.resize(graph.num_ranks());
  visited_.resize(graph.num_ranks());
  num_visited_ = 0;
  unvisited_shadow_ = 0;
  std::int64_t excess = 0;
  for (int r = 0; r < graph.num_ranks(); ++r) {
    visited_[r] = a.rank_load[r] > target;
    if (!visited_[r]) {
      unvisited_shadow_ |= ReplicaGraph::bit(r);
      continue;
    }
    excess += a.rank_load[r] - target;
    queue_[num_visited_++] = r;
    leaving_[r] = -1;
  }
  return excess;
}

std::int64_t AssignmentSearch::search(const ReplicaGraph& graph, std::int64_t target, std::int64_t excess,
                                      Assignment& a) {
  // Beyond 64 ranks, a bit represents several ranks and is never cleared; experts already followed are marked instead.
  const bool large = graph.num_ranks() > 64;
  const std::uint64_t kept = large ? unvisited_shadow_ : 0;
  if (large) followed_.assign(graph.num_experts(), 0);
  for (int head = 0; head < num_visited_ && num_visited_ < graph.num_ranks() && excess > 0; ++head) {
    const int from = queue_[head];
    for (const int s : graph.shared_slots(from)) {
      const int e = graph.expert_in(s);
      if ((graph.shadow(e) & unvisited_shadow_) == 0 || a.quota[s] == 0) continue;
      if (large && std::exchange(followed_[e], 1) != 0) continue;
      for (int t = graph.first_holder(e); t >= 0; t = graph.next_holder(t)) {
        const int to = graph.rank_of(t);
        if (visited_[to]) continue;
        visited_[to] = 1;
        unvisited_shadow_ &= kept | ~ReplicaGraph::bit(to);
        leaving_[to] = s;
        arriving_[to] = t;
        queue_[num_visited_++] = to;
        if (a.rank_load[to] < target) excess -= augment(graph, target, to, a);
      }
    }
  }
  return excess;
}

std::int64_t AssignmentSearch::augment(const ReplicaGraph& graph, std::int64_t target, int sink, Assignment& a) const {
  std::int64_t tokens = target - a.rank_load[sink];
  int source = sink;
  for (; leaving_[source] >= 0; source = graph.rank_of(leaving_[source])) {
    tokens = std::min(tokens, a.quota[leaving_[source]]);
  }
  tokens = std::min(tokens, a.rank_load[source] - target);
  if (tokens <= 0) return 0;  // exhausted by an earlier path of this search
  for (int rank = sink; rank != source; rank = graph.rank_of(leaving_[rank])) {
    a.quota[leaving_[rank]] -= tokens;
    a.quota[arriving_[rank]] += tokens;
  }
  a.rank_load[source] -= tokens;
  a.rank_load[sink] += tokens;
  return tokens;
}

std::int64_t AssignmentSearch::relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& a) {
  for (;;) {
    const std::int64_t excess = start(graph, target, a);
    const std::int64_t left = search(graph, target, excess, a);
    assert(adds_up(graph, a));
    if (left == 0 || left == excess) return left;
  }
}

std::int64_t AssignmentSearch::relieve_once(const ReplicaGraph& graph, std::int64_t target, Assignment& a) {
  return search(graph, target, start(graph, target, a), a);
}

// Raises `bound` to the density of the densest expert, whose holders must serve all its tokens. Returns that expert, or
// −1 if no expert is denser than the bound.
static int densest_expert(const ReplicaGraph& graph, const Assignment& a, std::int64_t& bound) {
  int densest = -1;
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (a.quota[s] <= bound) continue;  // an expert denser than the bound has a slot above it
    const int e = graph.expert_in(s);
    std::int64_t load = 0;
    for (int t = graph.first_holder(e); t >= 0; t = graph.next_holder(t)) load += a.quota[t];
    const std::int64_t density = ceil_div(load, graph.num_holders(e));
    if (density <= bound) continue;
    bound = density;
    densest = e;
  }
  return densest;
}

std::int64_t assign_tokens(const ReplicaGraph& graph, std::int64_t lower_bound, Assignment& a, AssignmentSearch& search,
                           std::vector<int>* tight_set) {
  if (tight_set != nullptr) tight_set->clear();
  std::int64_t target = lower_bound;
  const int densest = densest_expert(graph, a, target);
  if (densest >= 0 && tight_set != nullptr) {
    for (int s = graph.first_holder(densest); s >= 0; s = graph.next_holder(s)) {
      tight_set->push_back(graph.rank_of(s));
    }
  }
  while (search.relieve(graph, target, a) > 0) {
    std::int64_t load = 0;
    for (const int r : search.closed_set()) load += a.rank_load[r];
    target = ceil_div(load, std::ssize(search.closed_set()));  // rises: S has ranks above the old target, none below
    if (tight_set != nullptr) tight_set->assign(search.closed_set().begin(), search.closed_set().end());
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

}  // namespace foremoe::planner
