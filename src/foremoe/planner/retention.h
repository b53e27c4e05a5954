#pragma once

// Retention: decides which guests stay in their slots, given the guests that each micro-step needs.
//
// Problem. Each micro-step needs a set of guests, at most G per rank, the same in both passes. The order of the passes
// is known. Minimize the number of copies.
//
// Method. Each rank is a cache of G slots with known future requests. A guest is copied at the first event that needs
// it. The copy takes an empty slot if there is one, otherwise the slot whose guest is needed furthest in the future
// (Belady's rule, which is optimal: each rank makes as few copies as possible). Guests that are no longer needed stay
// until their slot is taken, at no cost. If an event's budget is exhausted, the copy moves to the latest earlier event
// that has budget left and comes after the last event that needed the slot's occupant. If there is no such event, the
// micro-step runs without this guest.
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

// Copies all guests at the first event, as far as its budgets allow, and never changes them (residency `static`).
GuestSlots pin_guests(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
                      const WantedGuests& wanted);

}  // namespace foremoe::planner
