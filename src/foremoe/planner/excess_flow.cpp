#include "foremoe/planner/excess_flow.h"

#include <algorithm>

namespace foremoe::planner {

// Computes distances breadth-first from all ranks with room, along reversed edges.
void ExcessFlow::label_all(const ReplicaGraph& graph, std::int64_t target, const Assignment& a) {
  const int parted = graph.num_ranks();
  label_.assign(graph.num_ranks(), parted);
  queue_.clear();
  for (int r = 0; r < graph.num_ranks(); ++r) {
    if (a.rank_load[r] >= target) continue;
    label_[r] = 0;
    queue_.push_back(r);
  }
  for (std::size_t head = 0; head < queue_.size(); ++head) {
    const int to = queue_[head];
    for (const int t : graph.shared_slots(to)) {
      for (int s = graph.first_holder(graph.expert_in(t)); s >= 0; s = graph.next_holder(s)) {
        const int from = graph.rank_of(s);
        if (a.quota[s] == 0 || label_[from] < parted) continue;
        label_[from] = label_[to] + 1;
        queue_.push_back(from);
      }
    }
  }
  num_labelled_.assign(parted + 1, 0);
  for (const int label : label_) ++num_labelled_[label];
}

void ExcessFlow::relabel(int rank, int label) {
  const int old = label_[rank];
  label_[rank] = label;
  ++num_labelled_[label];
  if (--num_labelled_[old] > 0) return;
  const auto parted = static_cast<int>(label_.size());
  for (int& of_rank : label_) {
    if (of_rank > old) of_rank = parted;
  }
  std::fill(num_labelled_.begin() + old, num_labelled_.end(), 0);
}

// Pushes the load of `rank` above the target to other ranks, as far as possible.
void ExcessFlow::discharge(const ReplicaGraph& graph, std::int64_t target, int rank, Assignment& a) {
  const int parted = graph.num_ranks();
  std::int64_t excess = a.rank_load[rank] - target;
  while (excess > 0 && label_[rank] < parted) {
    int lowest = parted;  // minimum label of the ranks that could receive tokens next
    for (const int s : graph.shared_slots(rank)) {
      for (int t = graph.first_holder(graph.expert_in(s)); t >= 0 && a.quota[s] > 0 && excess > 0;
           t = graph.next_holder(t)) {
        const int to = graph.rank_of(t);
        if (to == rank) continue;
        if (label_[to] >= label_[rank]) {
          lowest = std::min(lowest, label_[to]);
          continue;
        }
        const std::int64_t tokens = std::min(excess, a.quota[s]);
        if (a.rank_load[to] <= target && a.rank_load[to] + tokens > target) queue_.push_back(to);
        a.quota[s] -= tokens;
        a.quota[t] += tokens;
        a.rank_load[rank] -= tokens;
        a.rank_load[to] += tokens;
        excess -= tokens;
      }
    }
    if (excess > 0) relabel(rank, std::min(lowest + 1, parted));
  }
}

std::int64_t ExcessFlow::relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& a) {
  label_all(graph, target, a);
  queue_.clear();
  for (int r = 0; r < graph.num_ranks(); ++r) {
    if (a.rank_load[r] > target) queue_.push_back(r);
  }
  for (std::size_t next = 0; next < queue_.size();) discharge(graph, target, queue_[next++], a);
  std::int64_t above = 0;
  for (const std::int64_t load : a.rank_load) above += std::max<std::int64_t>(0, load - target);
  return above;
}

}  // namespace foremoe::planner
