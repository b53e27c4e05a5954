#pragma once

// What a phase comes to besides its seconds: bytes on the links, and memory.
//
// Memory. Of the rank that holds most at its fullest moment. Kept: from a micro-step's forward to its backward, per
//   layer what the cost model says of tokens and rows; K micro-steps' worth with K in flight. Working: the rows of the
//   layer that runs, of the micro-step that has most. A phase without backward keeps one layer's tokens. Guest slots
//   count as far as the plan ever fills one: all layers' at once, but under `shared` those of `depth` turns (of one
//   where a policy cannot know earlier what to copy), with gradients of one.

#include <cmath>
#include <vector>

#include "foremoe/sim/phase_replay.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/transfer/cluster_links.h"
#include "foremoe/transfer/copy_paths.h"

namespace foremoe {

// To the nearest byte, halves away from 0.
inline Bytes scaled(Bytes bytes, double by) { return Bytes{std::llround(static_cast<double>(bytes.value) * by)}; }

struct TrafficProblem {
  const ReplayProblem& phase;
  const Replay& replay;
  const ArenaLoad& arena;
  double seconds = 0;  // of the phase
};

std::vector<LinkTraffic> link_traffic(const TrafficProblem& problem);  // kind by kind
Array<Bytes, 2> bytes_between_nodes(const TrafficProblem& problem);    // [from][to], rows, copies and arenas

RankMemory rank_memory(const ReplayProblem& problem);

}  // namespace foremoe
