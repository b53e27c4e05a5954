#pragma once

// FineMoE's algorithm 1 (§5.2): which replica serves which of a source's tokens, from tokens per source and per
// replica.
//
//   none   for every expert, sources ascending: each fills the replicas in the order of their ranks (lines 10–16)
//   rank   first every source its own rank's replica (lines 4–9)
//   node   then those of its node (appendix A.1, topology-aware), then the others
//
// A plan routes by route_tokens (plan/route_tokens.h), which makes the same shipments as `node`; the other two are for
// ablations of what locality saves. Complexity: O(experts · (sources + replicas)) shipments.

#include <vector>

#include "foremoe/plan/route_tokens.h"

namespace foremoe::finemoe {

enum class Locality : std::uint8_t { kNone, kRank, kNode };

// By expert, then in the order in which algorithm 1 makes them; never empty ones.
std::vector<Shipment> route_by_algorithm_1(const RoutingProblem& problem, Locality locality);

struct CommunicationVolume {  // tokens; what a rank keeps for itself is none
  std::int64_t ranks = 0;     // the most that a rank sends or receives: comm of LP 4
  std::int64_t nodes = 0;     // the most that a node sends to or receives from others
};

CommunicationVolume communication_volume(std::span<const Shipment> shipments, const Topology& topology);

}  // namespace foremoe::finemoe
