#pragma once

// Stage B, homes: which experts should change places so that the micro-steps are balanced before any guest is copied.
//
// Problem. E/R homes on every rank, and at most `max_moves` experts of the layer away from where they were.
//
// Method. Exchange two experts of different ranks, the pair that most lowers Σ over micro-steps and ranks of
// (load above the mean)², as long as one does. An exchange changes two rank loads in every micro-step, so a pair is
// weighed in O(micro-steps), and only pairs with an expert on either rank are weighed again.
//
// Ends at a local optimum: every exchange lowers the sum. Cost: O(E²) per exchange to find the best pair, and
// O(E²/R · micro-steps) to weigh again.

#include <span>
#include <vector>

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Homes [expert] after at most max_moves experts have left `problem.home`.
std::vector<int> rehome(const LayerProblem& problem, int max_moves);

}  // namespace foremoe::planner
