#pragma once

// Chooses guests of `static` for one layer, until it is known whether `resident` is worse.
//
// Problem. Every `static` plan is also a `resident` plan. The search for `resident` handles one micro-step at a time,
// so its loads may exceed those of guests chosen for all micro-steps together. Choosing static guests takes longer than
// the whole search.
//
// Method. Static guests are chosen in parts: growth, then up to three sweeps. Each part lowers the loads by less than
// the previous one. After each part, a micro-step is skipped if the remaining parts cannot bring its load with static
// guests below the search's load. In groups of more than kCertainRanks, this is an estimate, which was right in all
// random steps. Smaller groups are swept until all targets are met or no sweep remains. balances_with() does not sweep
// if the search makes fewer copies than there are static guests. Nor does it sweep in large groups if this would save
// few copies. With 64 ranks, the limit is a tenth of the guests; it grows with the square of the group size.
// balances_with() skips growth if the search makes few more copies than it has initial guests. Stage B weighed these
// guests against copies, so fewer static guests are unlikely to meet all targets.

#include <cstdint>

#include "foremoe/planner/base_guests.h"

namespace foremoe::planner {

class StaticReference {
 public:
  // `beginning` contains the initial guests of the search.
  StaticReference(const LayerProblem& problem, const ReplicaGraph& beginning);

  // Returns whether static guests may bring m below a largest rank load of `level`. `level` is above m's target.
  bool may_beat(int m, std::int64_t level);

  // Returns whether may_beat() is exact: only in small groups, which are swept to the end.
  bool is_certain() const;

  // Like may_beat(), but chooses further guests as needed. True is certain, false only if is_certain().
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
