#pragma once

// What crossed the links of a phase, kind by kind.

#include <span>
#include <vector>

#include "foremoe/sim/arena_load.h"
#include "foremoe/sim/phase_replay.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {

struct TrafficProblem {
  const ReplayProblem& phase;
  const Replay& replay;
  const ArenaLoad& arena;
  double seconds = 0;  // of the phase
};

std::vector<LinkTraffic> link_traffic(const TrafficProblem& problem);
Array<Bytes, 2> bytes_between_nodes(const TrafficProblem& problem);  // [from][to], rows, copies and arenas

}  // namespace foremoe
