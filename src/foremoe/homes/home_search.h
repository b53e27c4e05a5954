#pragma once

// Homes of one layer by co-activation.
//
// Problem. Place E/R experts on each rank so that the tokens' experts lie on few nodes, and no node has much more load
//   than the mean. The cost of a placement is its number of pairs (token_sets.h) plus each node's assignments above
//   (1 + tolerance) times its share. The general problem, partitioning a hypergraph, is NP-hard.
// Method. Threshold accepting (Dueck and Scheuer 1990) over exchanges of two experts of different nodes, from the given
//   homes: an exchange is made if it increases the cost by less than a threshold, which falls linearly to 0. Then every
//   exchange that reduces the cost is made until there is none, and the cheapest placement met is the result. Within a
//   node, the expert with the most load goes to the rank with the least that has room.
// Invariant. `alone[e]` counts the tokens that touch e's node only because of e, and `absent[e][n]` those of its tokens
//   that do not touch node n. Their differences bound the change of an exchange from below, which rejects most
//   exchanges in constant time; only tokens that chose both experts make the change larger.
// Guarantee. The cost is at most that of the given homes on these tokens, and no exchange of two experts reduces it.
//   All arithmetic is on integers, so the result depends only on the arguments.
// Complexity. O(exchanges tried + T·k/E · (exchanges not rejected · k + exchanges made · (k + N))) for T tokens, top-k,
//   E experts and N nodes; O(T · (k + N)) memory.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/homes/token_sets.h"

namespace foremoe {

struct HomeSearchOptions {
  double tolerance = 0.2;  // load of a node above its share that costs nothing, as a fraction of the share
  int sweeps = 20;         // exchanges tried, in multiples of the number of pairs of experts
  std::uint64_t seed = 0;
};

// Pairs and excess load that the search minimises. home: [expert].
std::int64_t search_cost(std::span<const RankId> home, const TokenSets& sets, Topology topology, double tolerance);

// Returns the homes [expert] of a layer. home: [expert], E/R experts on each rank.
std::vector<RankId> search_homes(std::span<const RankId> home, const TokenSets& sets, Topology topology,
                                 const HomeSearchOptions& options);

}  // namespace foremoe
