#include "foremoe/plan/execution_order.h"

#include <algorithm>
#include <cassert>

namespace foremoe {

ExecutionOrder make_execution_order(int num_micro_steps, int in_flight) {
  assert(num_micro_steps >= 0 && in_flight >= 1);
  ExecutionOrder order{.num_micro_steps = num_micro_steps, .in_flight = in_flight};
  order.forward.resize(num_micro_steps);
  order.backward.resize(num_micro_steps);
  const auto append = [&](int m, Pass pass) {
    const EventId event{order.micro_step.size()};
    order.micro_step.emplace_back(m);
    order.pass.push_back(pass);
    (pass == Pass::kForward ? order.forward : order.backward)[m] = event;
  };
  if (in_flight == 1) {
    for (int m = 0; m < num_micro_steps; ++m) append(m, Pass::kForward);
    order.backward = order.forward;
    return order;
  }
  const int lead = std::min(in_flight, num_micro_steps);  // forwards before the first backward
  for (int m = 0; m < lead; ++m) append(m, Pass::kForward);
  for (int m = 0; m < num_micro_steps; ++m) {
    append(m, Pass::kBackward);
    if (m + lead < num_micro_steps) append(m + lead, Pass::kForward);
  }
  return order;
}

}  // namespace foremoe
