#include "foremoe/sim/free_update.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/transfer/copy_paths.h"

namespace foremoe {

namespace {

// As make_turn_order's with one micro-step in flight.
TurnOrder forward_and_backward(const StepPlan& plan) {
  const auto micro_steps = static_cast<std::size_t>(plan.num_micro_steps());
  const auto layers = static_cast<std::size_t>(plan.num_layers());
  TurnOrder order{.forward = Array<TurnId, 2>({micro_steps, layers}),
                  .backward = Array<TurnId, 2>({micro_steps, layers})};
  const auto take = [&](int event, Pass pass, int layer) {
    const MicroStepId m = plan.event_micro_step[static_cast<std::size_t>(event)];
    (pass == Pass::kForward ? order.forward : order.backward)(m, layer) = TurnId{order.size()};
    order.turns.push_back({.event = EventId{event}, .pass = pass, .micro_step = m, .layer = LayerId{layer}});
  };
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) take(t, Pass::kForward, l);
    for (int l = plan.num_layers() - 1; l >= 0; --l) take(t, Pass::kBackward, l);
  }
  order.first = order.forward;  // events are micro-steps
  order.last = order.backward;
  return order;
}

}  // namespace

TransferSchedule free_update_schedule(const StepPlan& plan, const ExpertLayout& layout,
                                      const ScheduleOptions& options) {
  if (plan.in_flight != 1) {
    throw InputError({.field = "in_flight"},
                     fmt::format("a plan of residency free has one micro-step in flight, not {}", plan.in_flight));
  }
  ScheduleOptions forward_only = options;
  forward_only.stage = Stage::kRecompute;
  TransferSchedule schedule = make_transfer_schedule(plan, layout, forward_only);
  const TurnOrder recompute = std::move(schedule.order);
  schedule.stage = Stage::kPolicyUpdate;
  schedule.order = forward_and_backward(plan);

  std::erase_if(schedule.copies, [&](const ScheduledCopy& copy) { return copy.arrives.value >= recompute.size(); });
  const auto backward_of = [&](TurnId t) {
    return schedule.order.backward(recompute[t].micro_step, recompute[t].layer);
  };
  for (ScheduledCopy& copy : schedule.copies) {
    // opens is the turn after the last reader of what was there before
    if (copy.opens > TurnId{0}) copy.opens = TurnId{backward_of(TurnId{copy.opens.value - 1}).value + 1};
    copy.arrives = schedule.order.forward(recompute[copy.arrives].micro_step, recompute[copy.arrives].layer);
    copy.closes = backward_of(copy.closes);
  }
  schedule.first_of_turn.clear();
  auto next = schedule.copies.begin();
  for (int t = 0; t < schedule.order.size() + 2; ++t) {
    while (next != schedule.copies.end() && next->arrives < TurnId{t}) ++next;
    schedule.first_of_turn.push_back(static_cast<std::size_t>(next - schedule.copies.begin()));
  }
  schedule.arena = experts_of_arenas(plan, schedule.copies);
  return schedule;
}

}  // namespace foremoe
