#pragma once

// The guests that residency `static` would choose for a layer, as far as `resident` must know them to be no worse.
//
// Problem. Every plan of `static` is one of `resident`, but `resident` searches micro-step by micro-step and may get
// stuck where guests chosen from all of them do not. To choose those takes longer than the whole search.
//
// Method. They are chosen in parts: grown, then swept up to three times, each part lowering the loads by less than the
// one before. After each part, a micro-step is left alone once the rival's load is so far above that the parts to come
// are not expected to make up for it: a bet, which no random step lost, in groups of more than kCertainRanks. Smaller
// ones are swept until they reach all targets, or to the end. A search that reaches its targets with fewer copies than
// static guests never asks, and in large groups guests are not swept to save less than a tenth of the copies. Stage B
// has weighed guests against copies before: static guests that meet all targets are not expected to be fewer than those
// that the search began with, so in large groups they are not even grown to save less than a tenth of these.

#include <cstdint>

#include "foremoe/planner/base_guests.h"

namespace foremoe::planner {

class StaticRival {
 public:
  // `beginning` is what the search begins with.
  StaticRival(const LayerProblem& problem, const ReplicaGraph& beginning);

  // Whether static guests may bring m below a largest rank load of `level`, which is above its target.
  bool may_beat(int m, std::int64_t level);

  // Whether what may_beat() says is so: in small groups, which are swept to the end.
  bool is_certain() const;

  // The same, once they are chosen as far as it takes to know.
  bool beats(int m, std::int64_t level);

  // Whether static guests reach the targets of all micro-steps with at most `copies` of them.
  bool balances_with(std::int64_t copies);

  // Homes, and the guests as far as they are chosen.
  const ReplicaGraph& graph() const { return graph_; }
  std::int64_t level(int m) const { return chosen_.level(m); }

  double cpu_seconds() const { return cpu_seconds_; }  // spent on choosing guests

 private:
  void begin();
  void sweep();
  double largest_excess() const;  // rank load ÷ target, the largest over micro-steps

  const LayerProblem& problem_;
  int num_begun_with_;  // guests of the search's beginning
  BaseGuests chosen_;
  ReplicaGraph graph_;
  bool begun_ = false;
  double cpu_seconds_ = 0;
};

}  // namespace foremoe::planner
