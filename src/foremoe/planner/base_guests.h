#pragma once

// Stage B, guests: those that the step begins with, from all of its micro-steps.
//
// Problem. One set of guests for the whole step. As the final word (residency static) it should make the largest rank
// load of every micro-step small; as a beginning (resident) it should leave little for copies inside the step to mend,
// and every guest is a copy too.
//
// Method. Every micro-step keeps its own assignment on the common placement, and the closed set S that binds it.
// Only a guest of an expert held wholly inside S on a rank outside helps that micro-step, so a change is re-solved in
// just those micro-steps whose S it crosses or whose tokens it moves. Guests are added greedily by the sum of what they
// promise over the micro-steps; then every guest slot in turn is emptied and given to the best expert, or to none,
// until a sweep changes nothing.
//
// Growing ends with the slots or with what is promised; a revision is kept only if it lowers the cost; sweeps are
// bounded. Cost per slot and sweep: one `relieve` per micro-step touched and per trial.

#include <cstdint>
#include <vector>

#include "foremoe/planner/excess_flow.h"
#include "foremoe/planner/layer_problem.h"
#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

enum class BaseGoal : std::uint8_t {
  kFinal,      // guests are final: Σ over micro-steps of the exact imbalance, large ones dearer
  kBeginning,  // guests may be replaced: tokens above the target, weighed against copies
};

// Whether copies inside the step are expected to hide behind computation, so that more of them hardly lengthen it: two
// guest slots, more than 16 ranks, and at least 8,192 rows per rank in the mean micro-step (1,024 tokens at eight
// experts each). Measured on modelled steps of 64 ranks (lab/performance.md); with one slot, or with fewer rows, sweeps
// shorten the step by 0.4 to 4 %.
bool copies_hide(const LayerProblem& problem);

class BaseGuests {
 public:
  BaseGuests(const LayerProblem& problem, BaseGoal goal);

  // Fills the guest slots of `graph`; guests that are already there are the start. Grown alone if `sweeps` is off.
  void choose(ReplicaGraph& graph, bool sweeps = true);

  // The same in parts: guests are added, then every slot is revised while may_change(), at most so often.
  static constexpr int kMostSweeps = 3;
  void grow_all(ReplicaGraph& graph);
  void sweep(ReplicaGraph& graph);
  bool may_change() const { return may_change_; }
  int num_sweeps() const { return num_sweeps_; }

  // The largest rank load of m with the guests as they are. For BaseGoal::kFinal.
  std::int64_t level(int m) const { return now_[m].level; }

 private:
  struct MicroStep {
    Assignment assignment;
    float cost = 0;
    std::vector<int> tight;      // ranks of the closed set; empty when nothing could be gained
    std::vector<char> in_tight;  // [rank]
    std::int64_t level = 0;      // load that S cannot get below, or the target
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
  bool grow(ReplicaGraph& graph);
  bool revise(ReplicaGraph& graph, int slot);

  const LayerProblem& problem_;
  BaseGoal goal_;
  float per_guest_;  // cost of one guest
  bool may_change_ = false;
  int num_sweeps_ = 0;
  AssignmentSearch search_;
  ExcessFlow flow_;
  std::vector<MicroStep> now_;      // [micro_step], of the placement as it is
  std::vector<MicroStep> without_;  // [micro_step], with one slot emptied
  Assignment scratch_;
  std::vector<float> least_;               // [micro_step], least_cost of the slot's rank, −1 not known yet
  std::vector<std::int64_t> least_level_;  // [micro_step], the level that this is the cost of, where guests are final
  std::vector<int> helped_;                // micro-steps that a trial changes
  std::vector<int> by_promise_;            // the same, most to be gained first
  std::vector<float> trial_cost_;          // [micro_step]
  std::vector<int> best_helped_;           // micro-steps that the best trial changes
  std::vector<float> score_;               // [expert] or [expert][rank]
  std::vector<int> order_;
  std::vector<char> reached_;  // [rank]
  std::vector<int> queue_;     // ranks
};

// Prefer::kLinks: what balance leaves of the guest slots keeps tokens on their node. A replica on a node that has none
// of its expert keeps there what the node's own ranks send to it. Token assignment then balances with these replicas as
// with any other.

// Fills empty guest slots of `graph`: the free slots of a node take the experts of which most would stay there over all
// micro-steps, on its ranks in turn from the least loaded at homes.
void add_local_guests(const LayerProblem& problem, ReplicaGraph& graph);

// For one micro-step: in the slots whose guests do not balance m (they have no tokens in `assignment`), exchanges those
// that keep little on their node in m for those that would keep most.
void renew_local_guests(const LayerProblem& problem, int m, const Assignment& assignment, ReplicaGraph& graph);

}  // namespace foremoe::planner
