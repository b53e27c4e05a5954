#pragma once

// Stage L under residency `free`: ranks exchange experts.
//
// Method. While the micro-step is above its target, the closed set S says from which ranks tokens must leave. Exchange
// an expert whose anchor (the replica that is never given up) is in S with a lighter one anchored outside, the pair
// that promises to move most; keep it if the excess falls. Two copies each, so guests are tried first.
//
// Needs the host copy of the weights, hence forward-only stages. At most R exchanges in a micro-step.

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Moves anchors in `problem` (home, home_slot) and `graph`; `assignment` ends as quotas of m with the least excess
// found. Returns whether anything moved.
bool exchange_anchors(LayerProblem& problem, int m, ReplicaGraph& graph, Assignment& assignment,
                      AssignmentWorkspace& workspace);

}  // namespace foremoe::planner
