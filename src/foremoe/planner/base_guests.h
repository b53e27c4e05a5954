#pragma once

// Stage B, guests: chooses the guests at the start of the step from the loads of all its micro-steps.
//
// Problem. Choose one set of guests for the whole step. If the guests are final (residency static), minimize the
// largest rank load of every micro-step. If they may be replaced (resident), minimize the imbalance that copies inside
// the step must remove, plus a cost per guest, since each guest is a copy.
//
// Method. Each micro-step has its own assignment on the common placement, and a closed set S of ranks that limits it. A
// guest helps a micro-step only if all replicas of its expert are inside S and its own rank is outside. A micro-step is
// solved again only if a change crosses its S or moves its tokens. Growth adds guests greedily by expected gain, summed
// over the micro-steps. In groups of 128 ranks or more, it adds several guests per scoring. Each sweep then empties
// every guest slot in turn and fills it with the best expert or none, until a sweep changes nothing.
//
// Locality (local_guests.h). If guests are final, local guests fill the slots that are not
// needed for balance. If they may be replaced, their local tokens lower the cost: local guests fill all free slots
// first, and sweeps give a slot to balance where that lowers the cost more.
//
// Growth ends when the slots are full or no gain is expected. A revision is kept only if it lowers the cost. The number
// of sweeps is bounded. Cost per slot and sweep: one `relieve` per affected micro-step and per trial.

#include <cstdint>
#include <vector>

#include "foremoe/planner/excess_flow.h"
#include "foremoe/planner/layer_problem.h"
#include "foremoe/planner/local_guests.h"
#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

enum class BaseGoal : std::uint8_t {
  kFinal,        // guests are final: minimize the sum of the micro-steps' imbalances, weighting large ones more
  kReplaceable,  // guests may be replaced: minimize tokens above the targets, weighed against copies
};

// Returns whether computation is expected to hide copies inside the step, so that more copies barely lengthen it. True
// for two or more guest slots, more than 16 ranks, and a mean of at least 8,192 rows per rank and micro-step (1,024
// tokens, eight experts each). In modelled steps of 64 ranks with one slot or fewer rows, sweeps shorten the step by
// 0.4 to 4 % (lab/performance.md).
bool copies_hide(const LayerProblem& problem);

class BaseGuests {
 public:
  BaseGuests(const LayerProblem& problem, BaseGoal goal) : BaseGuests(problem, goal, LocalGuests(problem)) {}
  BaseGuests(const LayerProblem& problem, BaseGoal goal, LocalGuests local);

  // Fills the guest slots of `graph`, starting from the guests already there. Without `sweeps`, only adds guests.
  void choose(ReplicaGraph& graph, bool sweeps = true);

  // Parts of choose(). grow_all() adds guests. sweep() revises all slots; choose() repeats it while may_change().
  static constexpr int kMostSweeps = 3;
  void grow_all(ReplicaGraph& graph);
  void sweep(ReplicaGraph& graph);
  bool may_change() const { return may_change_; }
  int num_sweeps() const { return num_sweeps_; }

  // Largest rank load of m with the current guests. For BaseGoal::kFinal.
  std::int64_t level(int m) const { return now_[m].level; }

 private:
  struct MicroStep {
    Assignment assignment;
    float cost = 0;
    std::vector<int> tight;      // ranks of the closed set; empty if no gain is possible
    std::vector<char> in_tight;  // [rank]
    std::int64_t level = 0;      // kFinal: largest rank load. kReplaceable: target
  };

  void solve(const ReplicaGraph& graph, int m, std::int64_t bound, MicroStep& state);
  std::int64_t perfect_level(int m) const;
  float cost_at(int m, std::int64_t level) const;
  void reach(const ReplicaGraph& graph, const Assignment& assignment);
  std::int64_t density_of_reached(const Assignment& assignment) const;
  std::int64_t relieve(const ReplicaGraph& graph, std::int64_t level, Assignment& assignment);
  float exact_cost(const ReplicaGraph& graph, int m, const MicroStep& state);
  float least_cost(const ReplicaGraph& graph, int m, int rank, const MicroStep& state);
  float promise(const MicroStep& state, int m, const ReplicaGraph& graph, int slot) const;
  float guest_cost(const ReplicaGraph& graph, int expert, int rank) const;
  bool grow(ReplicaGraph& graph);
  bool revise(ReplicaGraph& graph, int slot);

  const LayerProblem& problem_;
  BaseGoal goal_;
  LocalGuests local_;
  float per_guest_;  // cost of one guest
  bool may_change_ = false;
  int num_sweeps_ = 0;
  AssignmentSearch search_;
  ExcessFlow flow_;
  std::vector<MicroStep> now_;      // [micro_step], current placement
  std::vector<MicroStep> without_;  // [micro_step], placement with one slot emptied
  Assignment scratch_;
  std::vector<float> least_;               // [micro_step], least_cost of the slot's rank, −1 if not computed yet
  std::vector<std::int64_t> least_level_;  // [micro_step], the level of that cost; for kFinal
  std::vector<int> helped_;                // micro-steps that a trial changes
  std::vector<int> by_promise_;            // the micro-steps of helped_, largest possible gain first
  std::vector<float> trial_cost_;          // [micro_step]
  std::vector<int> best_helped_;           // micro-steps that the best trial changes
  std::vector<float> score_;               // [expert] or [expert][rank]
  std::vector<int> order_;
  std::vector<char> reached_;  // [rank]
  std::vector<int> queue_;     // ranks
};

}  // namespace foremoe::planner
