#pragma once

// Stage B, homes: which experts should change places so that the micro-steps are balanced before any guest is copied.
//
// Problem. E/R homes on every rank; the fewer leave their rank the better. Method. Exchange two experts of
// different ranks, as long as that lowers Σ over micro-steps and ranks of (load above the target)², the best exchange
// first. An exchange changes two rank loads in every micro-step, so it is weighed in O(micro-steps). At most
// `max_moves` experts end away from where they were. Ends at a local optimum: every exchange lowers the sum.

#include <span>
#include <vector>

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Homes [expert] after at most max_moves experts have left `problem.home`.
std::vector<int> rehome(const LayerProblem& problem, int max_moves);

}  // namespace foremoe::planner
