#pragma once

// Which tokens a source rank holds in a micro-step, in row order: its sequences ascending, each from its first
// token to its last. This is the order in which counts, routing and dispatch agree.

#include <span>
#include <vector>

#include "foremoe/core/ids.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

class SourceTokens {
 public:
  // Keeps a reference to the trace; the batching must be one of its sequences.
  SourceTokens(const RoutingTrace& trace, const Batching& batching);

  int num_ranks() const { return num_ranks_; }
  int top_k() const { return trace_.top_k; }
  std::span<const int> sequences(MicroStepId m, RankId source) const;  // ascending

  // The routes of one layer, [token][k] in row order, kNoExpert in missing rows. Replaces what `routes` held.
  void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const;

 private:
  const RoutingTrace& trace_;
  int num_ranks_ = 0;
  std::vector<std::size_t> first_;  // [micro_steps · ranks + 1], into sequences_
  std::vector<int> sequences_;
};

}  // namespace foremoe
