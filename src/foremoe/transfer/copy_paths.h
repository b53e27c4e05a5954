#pragma once

// By which path each copy of a schedule goes, and what the arenas hold for it.
//
// Problem. A copy can come from its node's arena or straight from the expert's home. An expert in an arena costs host
//   memory and is written there once per step, which pays when its node fetches it at least twice. Links should end
//   the step with about equal bytes.
// Method. An expert that its node fetches once comes from its peer. The others, by deadline, take the path whose
//   busiest link they load least, peers where both are equal. Links of
//     an arena        the receiver's link to the host, the arena
//     a peer nearby   the receiver's and the source's link to the other ranks of their node
//     a peer far off  the receiver's link to the host, which its network card shares, the source's egress, the link
//                     from node to node
//   and their loads are bytes since the step began.
// Complexity. O(copies + nodes · layers · experts).

#include <span>
#include <vector>

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct PathProblem {
  const StepPlan& plan;
  const TurnOrder& order;
  const ExpertLayout& layout;
  PathChoice choice = PathChoice::kAuto;
};

// Sets path and source of each copy; copies are by deadline.
void choose_paths(const PathProblem& problem, std::span<ScheduledCopy> copies);

// [node], ascending: the experts that copies of the host path fetch there.
std::vector<std::vector<ArenaExpert>> experts_of_arenas(const StepPlan& plan, std::span<const ScheduledCopy> copies);

}  // namespace foremoe
