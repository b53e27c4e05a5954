#pragma once

// Chooses the path of each copy of a schedule, and the experts that the arenas must contain.
//
// Problem. A copy can come from its node's arena or directly from the expert's home. An expert in an arena costs host
//   memory and is written before the phase, when nothing else runs. This can pay off if the node fetches the expert at
//   least twice. Links differ in bandwidth. The cost of a schedule is the time of its busiest link, bytes ÷ bandwidth.
// Method. An expert that a node fetches only once comes from a peer. All other copies, in order of deadline, take the
//   path that finishes first on its busiest link. Ties go to peers. The host path also pays the copy's share of writing
//   the arena. All copies use peers if filling the arenas plus the busiest link is not faster than peers alone.
// Guarantee. Filling the arenas plus the busiest link never takes longer than peers alone. The method ignores overlap
//   with computation. The simulator models overlap and also tries each path alone.
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
