#pragma once

// FineMoE's symmetric placement (§6.2, appendix B): where the replicas of every expert sit when nothing is known of
// their loads.
//
// Problem. Ranks are vertices, experts are edges (with d replicas hyperedges) between the ranks that hold them. The
// least largest rank load is the largest density of an induced subgraph (eq. 3), so choose edges such that under
// loads that are identically distributed no induced subgraph is expected to be dense.
//
// Method. Cayley graphs: a group of as many elements as ranks, and H = E/R base blocks of d elements, each beginning
// with the unit; the replicas of rank r's j-th home expert are where the translate of block j by r says. So each rank
// looks like every other, is home of H experts and holds d·H. For d = 2, {0, s} gives the generators s and −s.
//   2H = 2, a cycle             Z_R, {0, 1}                                     example 1
//   16 ranks, 2H = 4, a torus   Z_4 × Z_4, {0, (0,1)}, {0, (1,0)}               example 2
//   2H = R/2, bipartite         Z_R, all odd elements: K_{R/2,R/2}              example 3, which is its case R = 8
//   2H ≥ R − 1                  as often as it fits the complete graph, where one degree remains then the edges
//                               (0, 1), (2, 3), …, and where more remain the graph of that degree    example 4
//   else, and for d > 2         of many groups and base blocks those with the least second eigenvalue
// The paper says of the last line only that it "heuristically constructs many Cayley graphs for different (p, q)".
// The criterion is ours: few edges lie inside any set of vertices when the second eigenvalue is small (Alon, Chung
// 1988); the tori of all group shapes are among the candidates. The paper has 2^p ranks with 2^q replicas each and
// d = 2; other numbers of ranks, other degrees and d > 2 (translates of larger blocks) are our generalisation.
//
// Homes. Which end of an edge is the home is no part of the paper. Every rank is home of H edges: translates are
// homed at their rank, and what the complete graph leaves over is a union of two perfect matchings, so cycles, that
// are walked in one direction.
//
// Consistent indices (§B.3: an expert has the same local index on all ranks that hold it) are a matter of slots, and a
// plan with pinned homes fixes those: homes first. What the rule avoids, a deadlock of per-expert reductions in the
// order of local parameters, cannot happen here: guest gradients go home in (layer, expert, rank) order.
//
// Cost. O(kCandidates · H · d · R) once per plan. Seedless: the same shape, the same placement.

#include <optional>
#include <string>

#include "foremoe/core/array.h"

namespace foremoe::finemoe {

struct SymmetricShape {
  int num_ranks = 1;
  int homes_per_rank = 1;  // H
  int replicas = 2;        // d, of every expert
};

// Why G guest slots are not d − 1 per home expert with 2 ≤ d ≤ R; nothing when they are.
std::optional<std::string> symmetric_obstacle(int num_ranks, int homes_per_rank, int guest_slots);

// [home rank][its j-th home expert][replica], ranks: replica 0 is at home, the others on other ranks, all different.
// Each rank is in d·H of them. The shape has no obstacle.
Array<RankId, 3> symmetric_placement(const SymmetricShape& shape);

}  // namespace foremoe::finemoe
