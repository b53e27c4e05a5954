#include "foremoe/sim/free_update.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

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

bool holds(const StepPlan& plan, EventId event, const ScheduledCopy& where) {
  return std::ranges::find(plan.slot_expert.row(event, where.layer, where.rank), where.expert) !=
         plan.slot_expert.row(event, where.layer, where.rank).end();
}

// The turn after which a slot no longer holds what it holds at the first event.
TurnId end_of_first_lease(const StepPlan& plan, const TurnOrder& order, const ScheduledCopy& copy) {
  int event = 0;
  while (event + 1 < plan.num_events() &&
         plan.slot_expert(event + 1, copy.layer, copy.rank, copy.slot) == copy.expert) {
    ++event;
  }
  return order.last(event, copy.layer);
}

// The copies of the first event are those of what the last event does not hold: homes among them.
void begin_with_last_placement(const StepPlan& plan, TransferSchedule& schedule) {
  const EventId last{plan.num_events() - 1};
  const auto first_turn = [&](LayerId layer) { return schedule.order.first(0, layer); };
  std::erase_if(schedule.copies, [&](const ScheduledCopy& copy) {
    return copy.arrives == first_turn(copy.layer) && holds(plan, last, copy);
  });
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (int s = 0; s < plan.num_slots(); ++s) {
        const ExpertId expert = plan.slot_expert(0, l, r, s);
        if (expert == kNoExpert || plan.home(l, expert) != RankId{r}) continue;  // those away from home are there
        ScheduledCopy copy{.rank = RankId{r},
                           .layer = LayerId{l},
                           .expert = expert,
                           .slot = SlotId{s},
                           .buffer = l * plan.num_slots() + s,
                           .opens = TurnId{0},
                           .arrives = first_turn(LayerId{l}),
                           .path = Path::kHost,
                           .source = RankId{r}};
        if (holds(plan, last, copy)) continue;
        copy.closes = end_of_first_lease(plan, schedule.order, copy);
        schedule.copies.push_back(copy);
      }
    }
  }
  std::ranges::sort(schedule.copies, {},
                    [](const ScheduledCopy& copy) { return std::tuple(copy.arrives, copy.rank, copy.slot); });
}

void drop_return_to_homes(TransferSchedule& schedule) {
  std::erase_if(schedule.copies,
                [&](const ScheduledCopy& copy) { return copy.arrives.value >= schedule.order.size(); });
}

void index(TransferSchedule& schedule, const StepPlan& plan) {
  schedule.first_of_turn.clear();
  auto next = schedule.copies.begin();
  for (int t = 0; t < schedule.order.size() + 2; ++t) {
    while (next != schedule.copies.end() && next->arrives < TurnId{t}) ++next;
    schedule.first_of_turn.push_back(static_cast<std::size_t>(next - schedule.copies.begin()));
  }
  schedule.arena = experts_of_arenas(plan, schedule.copies);
}

}  // namespace

TransferSchedule free_update_schedule(const StepPlan& plan, const ExpertLayout& layout,
                                      const FreeUpdateOptions& options) {
  if (plan.in_flight != 1) {
    throw InputError({.field = "in_flight"},
                     fmt::format("a plan of residency free has one micro-step in flight, not {}", plan.in_flight));
  }
  TransferSchedule schedule =
      make_transfer_schedule(plan, layout, {.phase = Phase::kRecompute, .path = options.path, .depth = options.depth});
  drop_return_to_homes(schedule);
  const TurnOrder recompute = std::move(schedule.order);
  schedule.phase = Phase::kPolicyUpdate;
  schedule.order = forward_and_backward(plan);

  const auto backward_of = [&](TurnId t) {
    return schedule.order.backward(recompute[t].micro_step, recompute[t].layer);
  };
  for (ScheduledCopy& copy : schedule.copies) {
    // opens is the turn after the last reader of what was there before
    if (copy.opens > TurnId{0}) copy.opens = TurnId{backward_of(TurnId{copy.opens.value - 1}).value + 1};
    copy.arrives = schedule.order.forward(recompute[copy.arrives].micro_step, recompute[copy.arrives].layer);
    copy.closes = backward_of(copy.closes);
  }
  if (options.after_recompute) begin_with_last_placement(plan, schedule);
  index(schedule, plan);
  return schedule;
}

void leave_placement(TransferSchedule& schedule, const StepPlan& plan) {
  drop_return_to_homes(schedule);
  index(schedule, plan);
}

}  // namespace foremoe
