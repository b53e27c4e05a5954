#pragma once

// Bytes on the links and memory of a phase.
//
// Memory. The peak of the rank with the highest peak. With K micro-steps in flight, the activations of K micro-steps
//   are stored from forward to backward; the cost model computes their size per layer from tokens and rows. Phases
//   without backward store one layer's tokens. Working memory contains the rows of the running layer in the largest
//   micro-step. If the plan ever fills a guest slot, the guest slots of all layers count. Under `shared`, the slots of
//   `depth` turns count (of one turn if the policy copies only after the router), and the gradients of one turn.

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

NetworkRows network_rows(const PhaseProfile& profile, const Topology& topology);
std::vector<LinkTraffic> link_traffic(const TrafficProblem& problem);  // one entry per kind of link
Array<Bytes, 2> bytes_between_nodes(const TrafficProblem& problem);    // [from][to], rows, copies and arenas

Array<Activations, 2> activations(const ReplayProblem& problem);  // [event][rank]
RankMemory rank_memory(const ReplayProblem& problem, const Array<Activations, 2>& activations);

}  // namespace foremoe
