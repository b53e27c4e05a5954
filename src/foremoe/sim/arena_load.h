#pragma once

// Filling the arenas before a phase: every expert that a node's ranks will fetch from the host is written there by its
// home, across the network where the home is on another node, whose cards then share the receiving. All at once, and
// nothing else meanwhile: it takes as long as the link that carries most.

#include <vector>

#include "foremoe/plan/step_plan.h"
#include "foremoe/sim/cluster_links.h"

namespace foremoe {

struct ArenaLoad {
  std::vector<Bytes> bytes;       // [link]
  Array<Bytes, 2> between_nodes;  // [from][to]
  Bytes largest;                  // of the node whose arena holds most
  double seconds = 0;
};

ArenaLoad load_arenas(const std::vector<std::vector<ArenaExpert>>& arena, const StepPlan& plan, Bytes expert,
                      const ClusterLinks& links);

}  // namespace foremoe
