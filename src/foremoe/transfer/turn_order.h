#pragma once

// Time axis of an execution: one rank's turns, one per (pass, micro-step, layer), in execution order. Within an event,
// a forward pass visits layers in ascending order, a backward pass in descending order. If both passes share an event
// (one micro-step in flight), the forward turns come first.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "foremoe/plan/step_plan.h"

namespace foremoe {

enum class Phase : std::uint8_t { kRecompute, kPolicyUpdate };  // forward only; forward and backward

std::string_view to_string(Phase phase);  // "recompute", "policy_update"

using TurnId = Id<struct TurnTag>;

struct Turn {
  EventId event;  // of the plan
  Pass pass = Pass::kForward;
  MicroStepId micro_step;
  LayerId layer;

  friend bool operator==(const Turn&, const Turn&) = default;
};

struct TurnOrder {
  std::vector<Turn> turns;
  Array<TurnId, 2> forward;   // [micro_step][layer]
  Array<TurnId, 2> backward;  // [micro_step][layer]; empty for a forward-only phase
  Array<TurnId, 2> first;     // [event][layer], first turn that reads the slots of this event
  Array<TurnId, 2> last;      // [event][layer], last turn that reads them

  int size() const { return static_cast<int>(turns.size()); }
  const Turn& operator[](TurnId t) const { return turns[t.index()]; }
};

// Turns of a phase for the plan's events. Throws InputError for an invalid plan, for recompute if the plan has backward
// events (such plans are for policy_update alone), and for policy_update under residency `free`.
TurnOrder make_turn_order(const StepPlan& plan, Phase phase);

// Like make_turn_order(), for any plan. Only the simulation uses policy_update under `free`, to estimate its cost.
TurnOrder turns_of(const StepPlan& plan, Phase phase);

}  // namespace foremoe
