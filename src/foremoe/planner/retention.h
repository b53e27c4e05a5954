#pragma once

// Retention: decides which guests stay in their slots, given the guests that each micro-step needs.
//
// Problem. Each micro-step needs a set of guests, at most G per rank, the same in both passes. Minimize the number of
// copies for a known order of the passes.
//
// Method. Each rank is a cache of G slots with known future requests. A guest is copied at the first event that needs
// it. The copy takes an empty slot if there is one, otherwise the slot whose guest is needed furthest in the future
// (Belady's rule, which minimizes the copies of each rank). Guests that are no longer needed stay until they are
// replaced. If an event's budget is exhausted, the copy moves to the latest earlier event that has budget left, but
// only after the last event that needed the slot's occupant. If there is none, the micro-step runs without this guest.
//
// Complexity. O(events × ranks × G²), and O(events × G²) per copy to find the next uses.

#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Guests that one micro-step needs on each rank: at most G experts per rank, ascending.
using WantedGuests = std::vector<std::vector<int>>;  // [rank][…]

// Expert in every guest slot at every event, −1 if empty.
using GuestSlots = Array<int, 3>;  // [event][rank][guest slot]

// Minimizes the copies of guests, which stay until replaced (residency `resident`).
GuestSlots retain_guests(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
                         const std::vector<WantedGuests>& wanted);

// Copies all guests that the budgets allow at the first event, and never changes them (residency `static`).
GuestSlots pin_guests(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
                      const WantedGuests& wanted);

}  // namespace foremoe::planner
