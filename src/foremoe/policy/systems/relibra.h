#pragma once

// ReLibra (Jin et al., arXiv 2605.08639): uses replayed routes to balance load at two timescales. Between batches,
// simulated annealing on swaps moves experts' homes across nodes (relibra/expert_reordering.h). Within a batch, an
// incremental greedy search places replicas inside the nodes in every micro-step. It approximates a MILP over placement
// and token split (relibra/node_replication.h). Layers share the replicas' buffers.
//
// As a plan. Reordering determines the plan's homes and counts as home moves; replicas are guests of residency
// `shared`. Planning ends before the phase begins, so no planning runs between router and experts.
//
// Inferred: both objectives, the price of a move, the annealing schedule, and the order of the greedy search. We know
// only the paper's abstract and secondary descriptions, and there is no code. Each file marks its inferences.
//
// Not part of a plan: moving weights and optimizer states of reordered experts. The plan counts the home moves.

#include "foremoe/policy/policy.h"
#include "foremoe/policy/systems/relibra/expert_reordering.h"

namespace foremoe {

struct RelibraOptions {
  bool reorder = true;
  relibra::ReorderingOptions reordering;
};

std::unique_ptr<Policy> make_relibra(const RelibraOptions& options = {});

}  // namespace foremoe
