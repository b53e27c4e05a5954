#pragma once

// Replicas of one layer at one moment: maps slots to experts and experts to their slots. Token assignment moves tokens
// on this graph, in which two ranks are adjacent if both have a replica of the same expert.
//
// Slots are numbered rank by rank; rank r owns slots [first_slot(r), first_slot(r + 1)). put and drop take O(slots of a
// rank + holders). Ids are plain ints, since the planner reads them more often than any other data. Policies that use
// this graph also use plain ints.

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

namespace foremoe::planner {

class ReplicaGraph {
 public:
  ReplicaGraph() = default;
  ReplicaGraph(int num_ranks, int slots_per_rank, int num_experts)
      : num_ranks_(num_ranks),
        slots_per_rank_(slots_per_rank),
        expert_(static_cast<std::size_t>(num_ranks) * slots_per_rank, -1),
        next_(expert_.size(), -1),
        previous_(expert_.size(), -1),
        rank_(expert_.size()),
        first_holder_(num_experts, -1),
        num_holders_(num_experts, 0),
        shadow_(num_experts, 0),
        shared_(expert_.size()),
        num_shared_(num_ranks, 0) {
    for (std::size_t s = 0; s < rank_.size(); ++s) rank_[s] = static_cast<int>(s) / slots_per_rank;
  }

  int num_ranks() const { return num_ranks_; }
  int num_slots() const { return static_cast<int>(expert_.size()); }
  int num_experts() const { return static_cast<int>(first_holder_.size()); }
  int slots_per_rank() const { return slots_per_rank_; }

  int first_slot(int rank) const { return rank * slots_per_rank_; }
  int rank_of(int slot) const { return rank_[slot]; }
  int expert_in(int slot) const { return expert_[slot]; }  // −1 when empty

  int num_holders(int expert) const { return num_holders_[expert]; }
  // for (int s = first_holder(e); s >= 0; s = next_holder(s)) visits the slots with a replica of e, most recent first.
  int first_holder(int expert) const { return first_holder_[expert]; }
  int next_holder(int slot) const { return next_[slot]; }

  // The slots of a rank whose experts also have replicas on other ranks, ascending. Only tokens of these slots can
  // leave the rank.
  std::span<const int> shared_slots(int rank) const {
    return {shared_.data() + first_slot(rank), static_cast<std::size_t>(num_shared_[rank])};
  }

  // Bit mask of the ranks with a replica, rank modulo 64: exact up to 64 ranks, otherwise a superset.
  std::uint64_t shadow(int expert) const { return shadow_[expert]; }
  static std::uint64_t bit(int rank) { return std::uint64_t{1} << (rank % 64); }

  // Returns the slot of `expert` on `rank`, or −1.
  int find(int expert, int rank) const {
    int s = first_holder_[expert];
    while (s >= 0 && rank_[s] != rank) s = next_[s];
    return s;
  }

  void put(int slot, int expert) {
    assert(expert_[slot] < 0 && find(expert, rank_[slot]) < 0);
    expert_[slot] = expert;
    previous_[slot] = -1;
    next_[slot] = first_holder_[expert];
    if (next_[slot] >= 0) previous_[next_[slot]] = slot;
    first_holder_[expert] = slot;
    ++num_holders_[expert];
    shadow_[expert] |= bit(rank_[slot]);
    if (num_holders_[expert] == 2) share(next_[slot]);
    if (num_holders_[expert] >= 2) share(slot);
  }

  void drop(int slot) {
    const int expert = expert_[slot];
    assert(expert >= 0);
    (previous_[slot] >= 0 ? next_[previous_[slot]] : first_holder_[expert]) = next_[slot];
    if (next_[slot] >= 0) previous_[next_[slot]] = previous_[slot];
    expert_[slot] = -1;
    --num_holders_[expert];
    shadow_[expert] = 0;
    for (int s = first_holder_[expert]; s >= 0; s = next_[s]) shadow_[expert] |= bit(rank_[s]);
    if (num_holders_[expert] >= 1) unshare(slot);
    if (num_holders_[expert] == 1) unshare(first_holder_[expert]);
  }

 private:
  void share(int slot) {
    const int rank = rank_[slot];
    int* const begin = shared_.data() + first_slot(rank);
    int* at = begin + num_shared_[rank]++;
    for (; at > begin && at[-1] > slot; --at) *at = at[-1];
    *at = slot;
  }

  void unshare(int slot) {
    const int rank = rank_[slot];
    int* const begin = shared_.data() + first_slot(rank);
    int* const end = begin + num_shared_[rank]--;
    int* const at = std::find(begin, end, slot);
    std::copy(at + 1, end, at);
  }

  int num_ranks_ = 0;
  int slots_per_rank_ = 0;
  std::vector<int> expert_;            // [slot], −1 when empty
  std::vector<int> next_;              // [slot], next holder of the same expert, −1 at the end
  std::vector<int> previous_;          // [slot]
  std::vector<int> rank_;              // [slot]
  std::vector<int> first_holder_;      // [expert], −1 without replicas
  std::vector<int> num_holders_;       // [expert]
  std::vector<std::uint64_t> shadow_;  // [expert]
  std::vector<int> shared_;            // [slot]; from first_slot(rank), num_shared_[rank] slots of that rank
  std::vector<int> num_shared_;        // [rank]
};

}  // namespace foremoe::planner
