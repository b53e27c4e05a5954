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
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/random.h"

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

// FineMoE's random placement (§3 solution 2; "FineMoE (random)" of figure 8): the further replicas of every expert are
// shuffled over the guest slots of all ranks.
//
// The paper shuffles the experts of all but no particular copy of the model; here homes are pinned, so that one copy is
// theirs and the d − 1 others are shuffled. Inferred: no rank holds an expert twice, which would be a slot without use.
//
// Method. Shuffle all, then exchange each replica that its rank holds already with one of another rank such that
// neither is held twice afterwards, the search beginning at a random slot. Where nothing can be exchanged, shuffle
// again; after kShuffles, which small groups may need when d is near R, give replica i of a rank's experts to the i-th
// next rank.

// As symmetric_placement, for the same shapes.
Array<RankId, 3> random_placement(const SymmetricShape& shape, Random& random);

// Z_n1 × Z_n2 × …, the groups of FineMoE's Cayley graphs (appendix B.1). Elements are 0 … order − 1, written in mixed
// radix with the last factor as the lowest digit; 0 is the unit.

class AbelianGroup {
 public:
  explicit AbelianGroup(std::vector<int> factors);

  int order() const { return order_; }
  const std::vector<int>& factors() const { return factors_; }

  int add(int a, int b) const;

  // Character k of element x is exp(2πi · phase ÷ order). In [0, order).
  int phase(int k, int x) const;

  // {0, unit vector} for every factor: the generators of a torus.
  std::vector<std::vector<int>> unit_blocks() const;

 private:
  std::vector<int> factors_;
  int order_ = 1;
};

// One for every way to write the order as a product of factors of at least 2, in lexicographic order of the factors
// ascending. Those with the same group twice are both there: they are few.
std::vector<AbelianGroup> abelian_groups(int order);

}  // namespace foremoe::finemoe
