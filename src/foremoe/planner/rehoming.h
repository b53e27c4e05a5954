#pragma once

// Stage B, homes: exchanges experts so that micro-steps are balanced before any guest is copied.
//
// Problem. Place E/R homes on every rank. At most `max_moves` experts of the layer leave their current home.
//
// Method. Repeatedly exchange the two experts of different ranks that most lower Σ over micro-steps and ranks of (load
// above the mean)². An exchange changes two rank loads in every micro-step, so evaluating a pair takes O(micro-steps),
// and only pairs with an expert on one of the two ranks are evaluated again.
//
// Every exchange lowers the sum, so the search ends at a local optimum. Cost: O(E²) per exchange to find the best pair,
// and O(E²/R · micro-steps) to update the gains.

#include <span>
#include <vector>

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Returns homes [expert]; at most max_moves differ from `problem.home`.
std::vector<int> rehome(const LayerProblem& problem, int max_moves);

}  // namespace foremoe::planner
