#include "foremoe/planner/token_assignment.h"

#include <algorithm>
#include <limits>

namespace foremoe::planner {

void AssignmentWorkspace::prepare(const ReplicaGraph& graph) {
  if (rank_mark_.size() == static_cast<std::size_t>(graph.num_ranks()) &&
      expert_mark_.size() == static_cast<std::size_t>(graph.num_experts())) {
    return;
  }
  queue_.assign(graph.num_ranks(), 0);
  arrival_.assign(graph.num_ranks(), -1);
  departure_.assign(graph.num_experts(), -1);
  rank_mark_.assign(graph.num_ranks(), 0);
  expert_mark_.assign(graph.num_experts(), 0);
  mark_ = 0;
  queue_size_ = 0;
}

static void reset(const ReplicaGraph& graph, Assignment& a) {
  a.quota.assign(graph.num_slots(), 0);
  a.rank_load.assign(graph.num_ranks(), 0);
}

static void give(const ReplicaGraph& graph, Assignment& a, int slot, std::int64_t tokens) {
  a.quota[slot] += tokens;
  a.rank_load[graph.rank_of(slot)] += tokens;
}

void serve_at_homes(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& a) {
  reset(graph, a);
  for (int e = 0; e < graph.num_experts(); ++e) {
    int s = graph.first_holder(e);
    while (s >= 0 && graph.next_holder(s) >= 0) s = graph.next_holder(s);
    if (s >= 0) give(graph, a, s, expert_load[e]);
  }
}

// Raises the holders of one expert to a common level, lowest first, until its tokens are spent.
static void fill_holders(const ReplicaGraph& graph, int expert, std::int64_t tokens, Assignment& a) {
  while (tokens > 0) {
    std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
    std::int64_t next = lowest;  // the level above the lowest
    int at_lowest = 0;
    for (int s = graph.first_holder(expert); s >= 0; s = graph.next_holder(s)) {
      const std::int64_t load = a.rank_load[graph.rank_of(s)];
      if (load < lowest) {
        next = lowest;
        lowest = load;
        at_lowest = 1;
      } else if (load == lowest) {
        ++at_lowest;
      } else {
        next = std::min(next, load);
      }
    }
    const bool spread = next == std::numeric_limits<std::int64_t>::max() || (next - lowest) >= tokens / at_lowest;
    const std::int64_t share = spread ? tokens / at_lowest : next - lowest;
    std::int64_t extra = spread ? tokens % at_lowest : 0;
    for (int s = graph.first_holder(expert); s >= 0 && tokens > 0; s = graph.next_holder(s)) {
      if (a.rank_load[graph.rank_of(s)] != lowest) continue;
      const std::int64_t given = share + (extra > 0 ? 1 : 0);
      extra -= extra > 0 ? 1 : 0;
      give(graph, a, s, given);
      tokens -= given;
    }
  }
}

void water_fill(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& a) {
  reset(graph, a);
  int most = 0;
  for (int e = 0; e < graph.num_experts(); ++e) most = std::max(most, graph.num_holders(e));
  for (int holders = 1; holders <= most; ++holders) {
    for (int e = 0; e < graph.num_experts(); ++e) {
      if (graph.num_holders(e) != holders) continue;
      if (holders == 1) {
        give(graph, a, graph.first_holder(e), expert_load[e]);
      } else {
        fill_holders(graph, e, expert_load[e], a);
      }
    }
  }
}

std::int64_t relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& a, AssignmentWorkspace& w) {
  w.prepare(graph);
  const int per_rank = graph.slots_per_rank();
  for (;;) {
    ++w.mark_;
    int head = 0;
    int tail = 0;
    std::int64_t excess = 0;
    for (int r = 0; r < graph.num_ranks(); ++r) {
      if (a.rank_load[r] <= target) continue;
      excess += a.rank_load[r] - target;
      w.queue_[tail++] = r;
      w.rank_mark_[r] = w.mark_;
      w.arrival_[r] = -1;
    }
    bool moved = false;
    while (head < tail && excess > 0) {
      const int from = w.queue_[head++];
      for (int s = graph.first_slot(from), end = s + per_rank; s < end; ++s) {
        const int e = graph.expert_in(s);
        if (e < 0 || a.quota[s] <= 0 || graph.num_holders(e) < 2 || w.expert_mark_[e] == w.mark_) continue;
        w.expert_mark_[e] = w.mark_;
        w.departure_[e] = s;
        for (int t = graph.first_holder(e); t >= 0; t = graph.next_holder(t)) {
          const int to = graph.rank_of(t);
          if (w.rank_mark_[to] == w.mark_) continue;
          w.rank_mark_[to] = w.mark_;
          w.arrival_[to] = t;
          w.queue_[tail++] = to;
          if (a.rank_load[to] >= target) continue;
          // A rank with room: how much does the path to it carry?
          std::int64_t tokens = target - a.rank_load[to];
          int source = to;
          while (w.arrival_[source] >= 0) {
            const int leaving = w.departure_[graph.expert_in(w.arrival_[source])];
            tokens = std::min(tokens, a.quota[leaving]);
            source = graph.rank_of(leaving);
          }
          tokens = std::min(tokens, a.rank_load[source] - target);
          if (tokens <= 0) continue;  // an earlier path of this search used it up
          for (int rank = to; w.arrival_[rank] >= 0;) {
            const int arriving = w.arrival_[rank];
            const int leaving = w.departure_[graph.expert_in(arriving)];
            a.quota[leaving] -= tokens;
            a.quota[arriving] += tokens;
            rank = graph.rank_of(leaving);
          }
          a.rank_load[source] -= tokens;
          a.rank_load[to] += tokens;
          excess -= tokens;
          moved = true;
        }
      }
    }
    w.queue_size_ = tail;
    if (excess == 0) return 0;
    if (!moved) return excess;
  }
}

std::int64_t assign_tokens(const ReplicaGraph& graph, std::int64_t lower_bound, Assignment& a, AssignmentWorkspace& w,
                           std::vector<int>* tight_set) {
  if (tight_set != nullptr) tight_set->clear();
  std::int64_t target = lower_bound;
  while (relieve(graph, target, a, w) > 0) {
    std::int64_t load = 0;
    for (const int r : w.closed_set()) load += a.rank_load[r];
    const auto size = static_cast<std::int64_t>(w.closed_set().size());
    target = (load + size - 1) / size;  // above the old target: all of S is at it and some rank is beyond
    if (tight_set != nullptr) tight_set->assign(w.closed_set().begin(), w.closed_set().end());
  }
  return *std::max_element(a.rank_load.begin(), a.rank_load.end());
}

}  // namespace foremoe::planner
