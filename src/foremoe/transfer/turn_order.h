#pragma once

// The time axis of an execution: a rank's turns, one for each (pass, micro-step, layer), in the order in which it
// takes them. Within an event a forward visits layers ascending, a backward descending. Where forward and backward
// share an event (one micro-step in flight), its forward turns come first, then its backward turns.

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
  Array<TurnId, 2> backward;  // [micro_step][layer]; empty when the phase is forward-only
  Array<TurnId, 2> first;     // [event][layer], first turn that reads the slots of this event
  Array<TurnId, 2> last;      // [event][layer], last turn that reads them

  int size() const { return static_cast<int>(turns.size()); }
  const Turn& operator[](TurnId t) const { return turns[t.index()]; }
};

// The turns of a phase under the plan's events. A plan with backward events is the policy update's alone: asking for
// recompute then is an InputError, as is policy_update under residency `free`.
TurnOrder make_turn_order(const StepPlan& plan, Phase phase);

// The same of any plan. Nobody executes the policy update of residency `free`; the simulation asks what it would cost.
TurnOrder turns_of(const StepPlan& plan, Phase phase);

}  // namespace foremoe
