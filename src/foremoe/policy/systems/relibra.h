#pragma once

// ReLibra (Jin et al., arXiv 2605.08639): load balancing by replayed routes at two timescales. Between batches experts
// change homes across nodes, by simulated annealing on swaps (relibra/expert_reordering.h). Inside a batch every
// micro-step gets replicas within the nodes, by an incremental greedy that stands for a MILP over placement and token
// split (relibra/node_replication.h); their buffers are shared by the layers.
//
// As a plan. The reordering is the homes of the plan, counted as home moves; replicas are guests of residency `shared`.
// It plans before the phase begins, so nothing of it lies between router and experts.
//
// Inferred, as we know the paper's abstract and what others tell of it, and there is no code: both objectives, the
// schedule of the annealing, the order of the greedy; each file says so where it is.
//
// No counterpart in a plan: moving weights and optimizer states of reordered experts, which the count of home moves
// stands for.

#include "foremoe/policy/policy.h"
#include "foremoe/policy/systems/relibra/expert_reordering.h"

namespace foremoe {

struct RelibraOptions {
  bool reorder = true;
  relibra::ReorderingOptions reordering;
};

std::unique_ptr<Policy> make_relibra(const RelibraOptions& options = {});

}  // namespace foremoe
