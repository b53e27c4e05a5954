#pragma once

// The order in which one rank runs the passes of a stage: the time axis of a plan.
//
// With one micro-step in flight, forward and backward of a micro-step share one event and events are
// micro-steps. With K > 1 each pass is an event, in the order of 1F1B:
//   F0 … F(K−1) B0 F(K) B1 … B(M−1)

#include <vector>

#include "foremoe/core/ids.h"

namespace foremoe {

struct ExecutionOrder {
  int num_micro_steps = 0;
  int in_flight = 1;
  std::vector<MicroStepId> micro_step;  // [event]
  std::vector<Pass> pass;               // [event]
  std::vector<EventId> forward;         // [micro_step]
  std::vector<EventId> backward;        // [micro_step]; equals forward[m] with one in flight

  int num_events() const { return static_cast<int>(micro_step.size()); }
};

// in_flight ≥ 1; more than num_micro_steps is the same as num_micro_steps.
ExecutionOrder make_execution_order(int num_micro_steps, int in_flight);

}  // namespace foremoe
