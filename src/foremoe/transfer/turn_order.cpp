#include "foremoe/transfer/turn_order.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"

namespace foremoe {

std::string_view to_string(Phase phase) { return phase == Phase::kRecompute ? "recompute" : "policy_update"; }

static void check_phase_supported(const StepPlan& plan, Phase phase) {
  if (phase == Phase::kPolicyUpdate && plan.residency == Residency::kFree) {
    throw InputError(
        {.field = "residency"},
        "is free: experts leave their homes, so the plan has no backward pass and cannot serve policy_update");
  }
  const auto backward = std::ranges::find(plan.event_pass, Pass::kBackward);
  if (phase == Phase::kRecompute && backward != plan.event_pass.end()) {
    throw InputError({.field = "event_pass", .index = fmt::format("[{}]", backward - plan.event_pass.begin())},
                     fmt::format("is a backward pass: this plan, made for {} micro-steps in flight, is that of "
                                 "policy_update and cannot serve recompute",
                                 plan.in_flight));
  }
}

TurnOrder make_turn_order(const StepPlan& plan, Phase phase) {
  expect_valid(plan);
  check_phase_supported(plan, phase);
  return turns_of(plan, phase);
}

TurnOrder turns_of(const StepPlan& plan, Phase phase) {
  const auto events = static_cast<std::size_t>(plan.num_events());
  const auto layers = static_cast<std::size_t>(plan.num_layers());
  const auto micro_steps = static_cast<std::size_t>(plan.num_micro_steps());
  const bool with_backward = phase == Phase::kPolicyUpdate;
  const bool passes_share_events = plan.in_flight == 1;

  TurnOrder order;
  order.forward = Array<TurnId, 2>({micro_steps, layers});
  if (with_backward) order.backward = Array<TurnId, 2>({micro_steps, layers});
  order.first = Array<TurnId, 2>({events, layers}, TurnId{-1});
  order.last = Array<TurnId, 2>({events, layers}, TurnId{-1});

  const auto take = [&](EventId event, Pass pass, LayerId layer) {
    const TurnId turn{order.turns.size()};
    const MicroStepId m = plan.event_micro_step[event.index()];
    order.turns.push_back({.event = event, .pass = pass, .micro_step = m, .layer = layer});
    (pass == Pass::kForward ? order.forward : order.backward)(m, layer) = turn;
    if (order.first(event, layer) == TurnId{-1}) order.first(event, layer) = turn;
    order.last(event, layer) = turn;
  };
  const int num_layers = plan.num_layers();
  for (int t = 0; t < plan.num_events(); ++t) {
    const bool forward = plan.event_pass[t] == Pass::kForward;
    if (forward) {
      for (int l = 0; l < num_layers; ++l) take(EventId{t}, Pass::kForward, LayerId{l});
    }
    if (!forward || (with_backward && passes_share_events)) {
      for (int l = num_layers - 1; l >= 0; --l) take(EventId{t}, Pass::kBackward, LayerId{l});
    }
  }
  return order;
}

}  // namespace foremoe
