#pragma once

// Chooses the path of each copy of a schedule, and the experts that the arenas must contain.
//
// Problem. A copy can come from its node's arena or directly from the expert's home. An expert in an arena costs host
//   memory and is written before the phase, when nothing else runs. This can pay off if its node fetches it at least
//   twice. Links differ in bandwidth. The cost of a schedule is the time of its busiest link, bytes ÷ bandwidth.
// Method. Experts that their node fetches once come from peers. Every other copy, by deadline, takes the path whose
//   busiest link finishes first; ties go to peers. The host path also pays the copy's share of writing the arena. If
//   arenas and busiest link together then take as long as the busiest link with peers alone, or longer, all copies use
//   peers.
// Guarantee. Arenas and busiest link together never take longer than with peers alone. Overlap with computation is not
//   considered here; the simulator, which models it, also tries each path alone.
// Arenas. Each expert of an arena is written by its home, over the network if the home is on another node. The network
//   cards of the arena's node share the incoming data. All writes run at once and take the time of the busiest link.
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

// Links of the cluster. If `cluster` is null, all links have the same bandwidth, except that switches are unlimited.
ClusterLinks links_between(const Cluster* cluster, const Topology& topology, bool shares_uplink);

// Sets path and source of each copy. Copies are ordered by deadline.
void choose_paths(const PathProblem& problem, std::span<ScheduledCopy> copies);

// [node]: the experts that the node's copies fetch by the host path, ascending.
std::vector<std::vector<ArenaExpert>> experts_of_arenas(const StepPlan& plan, std::span<const ScheduledCopy> copies);

// Cost of filling the arenas.
struct ArenaLoad {
  std::vector<Bytes> bytes;       // [link]
  Array<Bytes, 2> between_nodes;  // [from][to]
  Bytes largest;                  // the largest arena of a node
  double seconds = 0;
};

// `expert` is the size of one expert's weights.
ArenaLoad load_arenas(const std::vector<std::vector<ArenaExpert>>& arena, const StepPlan& plan, Bytes expert,
                      const ClusterLinks& links);

}  // namespace foremoe
