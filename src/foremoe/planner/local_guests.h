#pragma once

// Stage B with Prefer::kLinks: what balance leaves of the guest slots, used to keep tokens on their node.
//
// Method. A replica on a node that has none of its expert keeps there what the node's own ranks send to it. The
// free slots of a node take the experts of which that is most over all micro-steps, on its ranks in turn from the least
// loaded at homes. Token assignment then balances with these replicas as with any other.

#include "foremoe/planner/layer_problem.h"

namespace foremoe::planner {

// Fills empty guest slots of `graph`.
void add_local_guests(const LayerProblem& problem, ReplicaGraph& graph);

// In the slots whose guests do not balance micro-step m (they have no tokens in `assignment`), exchanges those that
// keep little on their node in m for those that would keep most.
void renew_local_guests(const LayerProblem& problem, int m, const Assignment& assignment, ReplicaGraph& graph);

}  // namespace foremoe::planner
