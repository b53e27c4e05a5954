#pragma once

// Bytes on the links and memory of a phase.
//
// Memory. The peak of the rank that needs the most. Activations are kept from a micro-step's forward to its backward,
// for
//   K micro-steps with K in flight; the cost model gives their size per layer from tokens and rows. Working memory: the
//   rows of the running layer in the largest micro-step. A phase without backward keeps one layer's tokens. Guest slots
//   count if the plan ever fills one: those of all layers at once; under `shared` those of `depth` turns (of one turn
//   if the policy cannot know earlier what to copy), with the gradients of one turn.

#include <cmath>
#include <vector>

#include "foremoe/sim/phase_replay.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/transfer/cluster_links.h"
#include "foremoe/transfer/copy_paths.h"

namespace foremoe {

// Rounds to the nearest byte, halves away from 0.
inline Bytes scaled(Bytes bytes, double by) { return Bytes{std::llround(static_cast<double>(bytes.value) * by)}; }

struct TrafficProblem {
  const ReplayProblem& phase;
  const Replay& replay;
  const ArenaLoad& arena;
  double seconds = 0;  // of the phase
};

std::vector<LinkTraffic> link_traffic(const TrafficProblem& problem);  // one entry per kind of link
Array<Bytes, 2> bytes_between_nodes(const TrafficProblem& problem);    // [from][to], rows, copies and arenas

RankMemory rank_memory(const ReplayProblem& problem);

}  // namespace foremoe
