#pragma once

// FineMoE's symmetric placement (§6.2, appendix B): places replicas of every expert if loads are unknown.
//
// Problem. Ranks are vertices; experts are edges (hyperedges for d > 2 replicas) between the ranks that hold them. The
// smallest maximum rank load is the largest density of an induced subgraph (eq. 3). Choose edges such that, under
// identically distributed loads, no induced subgraph is expected to be dense.
//
// Method. Cayley graphs: a group with one element per rank, and H = E/R base blocks of d elements, each starting with
// the identity. The replicas of rank r's j-th home expert are on the ranks of block j translated by r. So all ranks are
// equivalent: each is home of H experts and holds d·H. For d = 2, {0, s} gives the generators s and −s.
//   2H = 2, a cycle             Z_R, {0, 1}                                     example 1
//   16 ranks, 2H = 4, a torus   Z_4 × Z_4, {0, (0,1)}, {0, (1,0)}               example 2
//   2H = R/2, bipartite         Z_R, all odd elements: K_{R/2,R/2}              example 3, which is its case R = 8
//   2H ≥ R − 1                  as many complete graphs as fit; if the remaining degree is odd, the edges (0, 1),
//                               (2, 3), …; for the rest, the graph of that degree                    example 4
//   else, and for d > 2         of many groups and base blocks, those with the least second eigenvalue
// For the last case, the paper specifies only that it "heuristically constructs many Cayley graphs for different (p,
// q)". We choose by the second eigenvalue: if it is small, every set of vertices has few inner edges (Alon, Chung
// 1988). The tori of all group shapes are among the candidates. The paper has 2^p ranks with 2^q replicas each and d =
// 2. We generalise to other numbers of ranks, other degrees and d > 2 (translates of larger blocks).
//
// Homes. The paper does not specify which end of an edge is the home. Every rank is home of H edges: the translate by r
// has its home at rank r. The edges left over by complete graphs are a union of two perfect matchings, i.e. cycles, and
// each cycle is traversed in one direction.
//
// By §B.3, an expert has the same local index on all ranks that hold it, to avoid a deadlock of per-expert reductions
// in the order of local parameters. A plan with pinned homes cannot follow this rule, since homes have the first slots.
// The deadlock cannot occur here: guest gradients go home in (layer, expert, rank) order.
//
// Complexity. O(kCandidates · R · H · d²) once per plan. No seed: the same shape gives the same placement.

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

// Returns nullopt if there are d − 1 guest slots per home expert with 2 ≤ d ≤ R, otherwise the reason why not.
std::optional<std::string> symmetric_shape_error(int num_ranks, int homes_per_rank, int guest_slots);

// Returns [home rank][its j-th home expert][replica], ranks: replica 0 at home, the others on distinct other ranks.
// Each rank holds d·H replicas. Requires !symmetric_shape_error(…).
Array<RankId, 3> symmetric_placement(const SymmetricShape& shape);

// FineMoE's random placement (§3 solution 2; "FineMoE (random)" of figure 8): shuffles the further replicas of every
// expert over the guest slots of all ranks.
//
// The paper shuffles all copies of the model's experts. Here homes are pinned and form one copy; we shuffle the d − 1
// others. Inferred: no rank holds an expert twice, since the second replica would have no effect.
//
// Method. Shuffle all. Then exchange each replica that its rank already holds with a replica of another rank, so that
// neither rank holds an expert twice. The search starts at a random slot. If no exchange is possible, shuffle again.
// After kShuffles attempts, which small groups with d near R can need, give replica i of a rank's experts to the i-th
// next rank.

// Takes the same shapes, and returns the same format, as symmetric_placement().
Array<RankId, 3> random_placement(const SymmetricShape& shape, Random& random);

// Z_n1 × Z_n2 × …, the groups of FineMoE's Cayley graphs (appendix B.1). Elements are 0 … order − 1 in mixed radix,
// with the last factor as the lowest digit; 0 is the identity.

class AbelianGroup {
 public:
  explicit AbelianGroup(std::vector<int> factors);

  int order() const { return order_; }
  const std::vector<int>& factors() const { return factors_; }

  int add(int a, int b) const;

  // Character k of element x is exp(2πi · phase ÷ order), where phase is in [0, order).
  int phase(int k, int x) const;

  // Returns {0, unit vector} for every factor: the generators of a torus.
  std::vector<std::vector<int>> unit_blocks() const;

 private:
  std::vector<int> factors_;
  int order_ = 1;
};

// Returns one group per factorisation of the order into factors of at least 2, in lexicographic order of the ascending
// factors. Includes isomorphic groups, since there are few.
std::vector<AbelianGroup> abelian_groups(int order);

}  // namespace foremoe::finemoe
