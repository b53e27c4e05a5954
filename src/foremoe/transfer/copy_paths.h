#pragma once

// By which path each copy of a schedule goes, and what the arenas hold for it.
//
// Problem. A copy can come from its node's arena or straight from the expert's home. An expert in an arena costs host
//   memory and is written there before the phase, while nothing else happens, which can pay when its node fetches it at
//   least twice. Links have unequal bandwidth, and what a schedule costs is what its busiest link takes: bytes ÷
//   bandwidth.
// Method. An expert that its node fetches once comes from its peer. Each of the others, by deadline, takes the path
//   whose busiest link is done with it first, peers where both are; to the host path comes the copy's part of writing
//   the arena. If the arenas' seconds and those of the busiest link then come to no less than the busiest link has with
//   peers alone, all go to peers.
// Guarantee. Arenas and busiest link together never take longer than with peers alone. Whether copies hide behind
//   computing is not asked: the simulator, which knows, also tries either path alone.
// Arenas. Every expert of an arena is written by its home, across the network where the home is on another node, whose
//   cards then share the receiving. All are written at once: it takes as long as the link that carries most.
// Complexity. O(copies · log of copies + nodes · layers · experts).

#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/transfer/cluster_links.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct PathProblem {
  const StepPlan& plan;
  const TurnOrder& order;
  const ExpertLayout& layout;
  const ClusterLinks& links;
  PathChoice choice = PathChoice::kAuto;
};

// Of a cluster, or, where there is none, of links that are all alike: bytes alone tell them apart.
ClusterLinks links_between(const Cluster* cluster, const Topology& topology, bool shares_uplink);

// Sets path and source of each copy; copies are by deadline.
void choose_paths(const PathProblem& problem, std::span<ScheduledCopy> copies);

// [node], ascending: the experts that copies of the host path fetch there.
std::vector<std::vector<ArenaExpert>> experts_of_arenas(const StepPlan& plan, std::span<const ScheduledCopy> copies);

// What it takes to fill arenas.
struct ArenaLoad {
  std::vector<Bytes> bytes;       // [link]
  Array<Bytes, 2> between_nodes;  // [from][to]
  Bytes largest;                  // of the node whose arena holds most
  double seconds = 0;
};

// `expert`: its weights.
ArenaLoad load_arenas(const std::vector<std::vector<ArenaExpert>>& arena, const StepPlan& plan, Bytes expert,
                      const ClusterLinks& links);

}  // namespace foremoe
