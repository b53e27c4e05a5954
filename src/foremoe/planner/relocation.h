#pragma once

// Stage L: whole experts, for one micro-step.
//
// Method. Take the most loaded rank; of the experts that it serves whole, move the one, to the rank with a slot to
// spare, which leaves the smaller maximum of the two; stop when that helps no more or the rank is at the target. A
// guest that serves all of an expert's tokens splits no batch and lets its home rest. No search: one pass over experts
// × ranks for each move.
//
// A slot is to spare when it is empty or its guest serves nobody in this micro-step.
//
// Under residency `free`, L runs after P: ranks exchange experts where guests alone miss the target. The closed set S
// says from which ranks tokens must leave. Exchange an expert whose anchor (the replica that is never given up) is in S
// with a lighter one anchored outside, the pair that promises to move most; keep it if the excess falls. An exchange is
// two copies, so guests are tried first. It needs the host copy of the weights, hence forward-only phases. At most R
// exchanges in a micro-step.

#include <vector>

#include "foremoe/planner/copy_ledger.h"

namespace foremoe::planner {

// Changes `graph` and `assignment`, quotas of micro-step m on it. Returns [expert], 1 where the home rests.
std::vector<char> relocate_experts(const LayerProblem& problem, int m, CopyLedger& ledger, ReplicaGraph& graph,
                                   Assignment& assignment);

// Moves anchors in `problem` (home, home_slot) and `graph`; `assignment` ends as quotas of m with the least excess
// found. Returns whether anything moved.
bool exchange_anchors(LayerProblem& problem, int m, ReplicaGraph& graph, Assignment& assignment,
                      AssignmentSearch& search);

}  // namespace foremoe::planner
