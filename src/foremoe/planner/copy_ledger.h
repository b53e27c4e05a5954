#pragma once

// Tracks the guests that a micro-step starts with, the copies that it makes, and its copy budgets.

#include <algorithm>
#include <vector>

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

class CopyLedger {
 public:
  CopyLedger(const LayerProblem& problem, const PlannerOptions& options)
      : problem_(&problem),
        max_per_rank_(options.max_copies_per_rank.value_or(kNoLimit)),
        max_per_source_(options.max_copies_per_source),
        found_(static_cast<std::size_t>(problem.num_ranks()) * problem.slots_per_rank(), -1),
        copies_to_(problem.num_ranks(), 0),
        copies_from_(problem.num_ranks(), 0) {}

  void begin(const ReplicaGraph& graph) {
    for (int s = 0; s < graph.num_slots(); ++s) found_[s] = graph.expert_in(s);
    std::fill(copies_to_.begin(), copies_to_.end(), 0);
    std::fill(copies_from_.begin(), copies_from_.end(), 0);
  }

  int found(int slot) const { return found_[slot]; }
  bool is_copy(const ReplicaGraph& graph, int slot) const {
    return graph.expert_in(slot) >= 0 && graph.expert_in(slot) != found_[slot];
  }

  // Returns whether the budgets allow `expert` to replace the present guest in `slot`.
  bool permits(const ReplicaGraph& graph, int slot, int expert) const {
    if (expert == found_[slot]) return true;
    const int rank = graph.rank_of(slot);
    return copies_to_[rank] - (is_copy(graph, slot) ? 1 : 0) < max_per_rank_ &&
           copies_from_[problem_->home[expert]] < max_per_source_;
  }

  // Puts `expert` into `slot`, which may contain another guest. −1 leaves the slot empty.
  void replace(ReplicaGraph& graph, int slot, int expert) {
    if (is_copy(graph, slot)) count(graph.rank_of(slot), graph.expert_in(slot), -1);
    if (graph.expert_in(slot) >= 0) graph.drop(slot);
    if (expert < 0) return;
    graph.put(slot, expert);
    if (is_copy(graph, slot)) count(graph.rank_of(slot), expert, 1);
  }

  int num_copies(const ReplicaGraph& graph) const {
    int copies = 0;
    for (int s = 0; s < graph.num_slots(); ++s) copies += is_copy(graph, s) ? 1 : 0;
    return copies;
  }

 private:
  void count(int rank, int expert, int by) {
    copies_to_[rank] += by;
    copies_from_[problem_->home[expert]] += by;
  }

  const LayerProblem* problem_;
  int max_per_rank_;
  int max_per_source_;
  std::vector<int> found_;        // [slot], expert, −1 empty
  std::vector<int> copies_to_;    // [rank]
  std::vector<int> copies_from_;  // [rank], home of the copied expert
};

}  // namespace foremoe::planner
