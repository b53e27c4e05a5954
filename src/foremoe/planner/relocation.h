#pragma once

// Stage L, relocation: moves whole experts, for one micro-step.
//
// Method. Take the most loaded rank. Its candidates are experts that only its home slots serve. Destinations are ranks
// with the expert or a free slot. Choose the move that minimizes the larger load of the two ranks. Stop when no move
// helps or the rank is at the target. If a guest serves all tokens of an expert, its batch is not split and the home is
// idle. A move takes one pass over experts × ranks.
//
// A slot is free if it is empty or its guest serves no tokens in this micro-step.
//
// Under residency `free`, L runs after P: ranks exchange experts if guests alone miss the target. Tokens must leave the
// ranks of the closed set S. An expert's anchor is the replica that is never removed. A candidate pairs an expert
// anchored on a rank above the target with a lighter one anchored outside S. The pairs with the largest possible gain
// are tried, and the best is kept if it lowers the excess. An exchange makes two copies, so guests are tried first.
// Experts leave their homes, so exchanges are limited to forward-only phases. Makes at most R exchanges per micro-step.

#include <vector>

#include "foremoe/planner/copy_ledger.h"

namespace foremoe::planner {

// Changes `graph` and `assignment`, which contains the quotas of m on `graph`. Returns [expert], 1 if the home is idle.
std::vector<char> relocate_experts(const LayerProblem& problem, int m, CopyLedger& ledger, ReplicaGraph& graph,
                                   Assignment& assignment);

// Moves anchors in `problem` (home, home_slot) and `graph`. `assignment` ends as the quotas of m with the least excess
// found. Returns whether any anchor moved.
bool exchange_anchors(LayerProblem& problem, int m, ReplicaGraph& graph, Assignment& assignment,
                      AssignmentSearch& search);

}  // namespace foremoe::planner
