#pragma once

// Stage L: whole experts, for one micro-step.
//
// Method. Take the most loaded rank; of the experts that it serves whole, move the one, to the rank with a slot to
// spare, which leaves the smaller maximum of the two; stop when that helps no more or the rank is at the target. A
// guest that serves all of an expert's tokens splits no batch and lets its home rest. No search: one pass over experts
// × ranks for each move.
//
// A slot is to spare when it is empty or its guest serves nobody in this micro-step.

#include <vector>

#include "foremoe/planner/copy_ledger.h"

namespace foremoe::planner {

// Changes `graph` and `assignment` (quotas of micro-step m on it). `rests[e]` becomes 1 where the home rests.
void relocate_experts(const LayerProblem& problem, int m, CopyLedger& ledger, ReplicaGraph& graph,
                      Assignment& assignment, std::vector<char>& rests);

}  // namespace foremoe::planner
