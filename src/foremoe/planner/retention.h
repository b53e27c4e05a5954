#pragma once

// Which guests stay, once it is known which guests every micro-step wants: the horizon.
//
// Problem. The micro-steps want sets of guests, at most G per rank; both passes of a micro-step want the same. The
// passes come in a known order. Keep guests in the slots so that as few as possible must be copied.
//
// Method. Each rank is a cache of G slots whose future is known. A guest is copied when the first event wants it; when
// a slot must be found, an empty one is taken, else that of the guest which is wanted again furthest ahead (Belady's
// rule, which is optimal: every rank's copies are the fewest possible). Guests that nobody wants again stay until their
// slot is needed: they cost nothing. Where a budget is spent, a copy is made at an earlier event at which its slot held
// nobody who was wanted again and the budget has room; if there is none, the guest is not there and the micro-step does
// without.
//
// Complexity: O(events × ranks × G), and for each copy O(events × G) to see what is wanted again when.

#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// What one micro-step wants on each rank: experts, no rank more than G, ascending.
using WantedGuests = std::vector<std::vector<int>>;  // [rank][…]

// Expert in every guest slot at every event, −1 empty.
using GuestSlots = Array<int, 3>;  // [event][rank][guest slot]

// Fewest copies for guests that stay until replaced (residency `resident`, `free`).
GuestSlots retain_guests(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
                         const std::vector<WantedGuests>& wanted);

// Guests that are copied at the first event, as far as its budgets permit, and never change (residency `static`).
GuestSlots pin_guests(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
                      const WantedGuests& wanted);

}  // namespace foremoe::planner
