#pragma once

// Guests that `static` would choose for a layer, computed only as far as needed to ensure that `resident` is not worse.
//
// Problem. Every `static` plan is also a `resident` plan, but the search for `resident` handles one micro-step at a
// time, so its loads may end above those of guests chosen for all micro-steps together. Choosing static guests takes
// longer than the whole search.
//
// Method. Static guests are chosen in parts: growth, then up to three sweeps, each of which lowers the loads by less
// than the previous part. After each part, a micro-step is skipped if its load with static guests is too high for later
// parts to bring it below the search's load. In groups of more than kCertainRanks this is an estimate (no random step
// refuted it). Smaller groups are swept until all targets are met, or to the end. balances_with() does not sweep if the
// search makes fewer copies than there are static guests. In large groups it does not sweep to save few copies either:
// less than a tenth of the guests with 64 ranks, a part that grows with the square of the group. It even skips growth
// if the search hardly makes more copies than it has initial guests: stage B weighed these against copies, so fewer
// static guests are not expected to meet all targets.

#include <cstdint>

#include "foremoe/planner/base_guests.h"

namespace foremoe::planner {

class StaticReference {
 public:
  // `beginning` contains the initial guests of the search.
  StaticReference(const LayerProblem& problem, const ReplicaGraph& beginning);

  // Returns whether static guests may bring m below a largest rank load of `level`. `level` is above m's target.
  bool may_beat(int m, std::int64_t level);

  // Returns whether may_beat() is exact. It is in small groups, which are swept to the end.
  bool is_certain() const;

  // As may_beat(), after choosing guests as far as needed for an exact answer.
  bool beats(int m, std::int64_t level);

  // Returns whether at most `copies` static guests meet the targets of all micro-steps.
  bool balances_with(std::int64_t copies);

  // Homes and the static guests chosen so far.
  const ReplicaGraph& graph() const { return graph_; }
  std::int64_t level(int m) const { return chosen_.level(m); }

  double cpu_seconds() const { return cpu_seconds_; }  // time spent on choosing guests

 private:
  void begin();
  void sweep();
  double largest_excess() const;  // largest rank load ÷ target over all micro-steps

  const LayerProblem& problem_;
  int num_initial_guests_;  // initial guests of the search
  BaseGuests chosen_;
  ReplicaGraph graph_;
  bool begun_ = false;
  double cpu_seconds_ = 0;
};

}  // namespace foremoe::planner
