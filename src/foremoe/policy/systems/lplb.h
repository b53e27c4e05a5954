#pragma once

// LPLB (DeepSeek, https://github.com/deepseek-ai/LPLB): a linear-programming load balancer. Every replicated expert is
// an edge between two ranks of a fixed topology (lplb::Edges). In every micro-step, its tokens are split between the
// two ranks to minimise the largest rank load.
//
// Placement. Each rank copies its experts with the most tokens, one along each outgoing edge. No expert has more than
// two replicas. Expected tokens are the previous step's (`previous_load`), else this step's sum, known from recorded
// routes. Guests stay for the whole step (residency `resident`).
//
// Tokens. The program minimises the largest rank load with 0 ≤ flow ≤ tokens on each edge. With two replicas per expert
// it is FineMoE's LP 1. Our exact assignment solves it; a test compares it with CLP. LPLB itself stops after five steps
// of an interior point method on a GPU, and halves the tokens if it has not converged. Our split is always optimal. If
// a topology repeats in groups of ranks, LPLB minimises the maximum of each group, and we that of all groups. ρ is the
// same.
//
// Guest slots. The automatic topology has edges if G ≥ 1 and R ≥ 2. It uses min(G, E/R) slots, rounded down to a
// multiple of `columns`. Options select other topologies; the policy is skipped where they are undefined.
//
// Not part of a plan: LPLB may also reorder experts over ranks by EPLB without replicas, from long-term loads. Here
// homes do not move. This is LPLB's `update_redundancy_mapping` without a workload, except that a rank's experts are
// sorted. LPLB rounds the split to whole tokens at random; our split is integral.

#include <optional>
#include <string>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/policy/policy.h"

namespace foremoe::lplb {

// LPLB's topologies: which ranks share an expert.
//
// A topology has `columns` and repeats in groups of consecutive ranks. In each column, every rank copies an expert
// from its `source`, another rank of its group, and every rank is the source of exactly one rank. So a copy is an edge
// along which tokens can flow. With G guest slots, a rank holds ⌊G / columns⌋ copies per column: in column c, experts
// c, c + columns, … of its source, most loaded first. Other slots stay empty.
//
//   ring       1 column    groups of 8 where 8 divides the ranks (RING_8P), else one group of all ranks
//   cube       2 columns   groups of 8: cycles of four, and diagonals between two of them (CUBE_8P2E)
//   hypercube  2 columns   groups of 16: cycles of four, and cycles of four across them (HYPERCUBE_16P2E)
//   torus      2 columns   all ranks: the same place on the next node, and the next rank on the same node (torus_2d)
//
// Except for rings of other sizes, these are tables or code of the repository (tests/utils.py of
// https://github.com/deepseek-ai/LPLB).

enum class Edges : std::uint8_t { kAutomatic, kRing, kCube, kHypercube, kTorus };

// Chooses a topology. If each rank can hold two or more `copies`, uses the hypercube for 16 ranks, the cube for 8, the
// torus for several full nodes of several ranks, else the cube if 8 divides the ranks. Otherwise uses the ring.
Edges choose_edges(const Topology& topology, int copies);

// Returns the reason why this topology is undefined, or nullopt. `copies` is per rank.
std::optional<std::string> edges_error(Edges edges, const Topology& topology, int copies);

// Returns [rank][column], the rank whose expert is copied. Requires !edges_error(…).
Array<RankId, 2> edge_sources(Edges edges, const Topology& topology);

}  // namespace foremoe::lplb

namespace foremoe {

struct LplbOptions {
  lplb::Edges edges = lplb::Edges::kAutomatic;
};

std::unique_ptr<Policy> make_lplb(const LplbOptions& options = {});

}  // namespace foremoe
