#pragma once

// LPLB (DeepSeek, https://github.com/deepseek-ai/LPLB): a linear-programming load balancer. Every replica is an edge
// between two ranks of a fixed topology (lplb::Edges); in every micro-step the tokens of the replicated
// experts are split over the two ends of their edges so that the largest rank load is least.
//
// Placement. On every rank the experts with most tokens are copied, one per edge that leaves it; no expert has more
// than two copies. What they have is expected from the former step (`previous_load`), else from this step's sum, which
// foresight permits. Guests stay for the whole step: residency `resident`.
//
// Tokens. The program: minimise the largest rank load with 0 ≤ flow ≤ tokens on each edge. With two copies per expert
// it is FineMoE's LP 1, and is solved by our exact assignment; a test holds it to CLP. LPLB itself ends after five
// steps of an interior point method, on a GPU, and takes halves where these do not suffice; here it always has the
// optimum. Where a topology repeats in groups of ranks, LPLB minimises in each, and here the largest of all is: the
// same ρ.
//
// Guest slots. The automatic topology needs G ≥ 1; ⌊G / columns⌋ · columns slots are used, and no more than a rank has
// experts. Other topologies by option, skipped where they are not defined.
//
// No counterpart in a plan: LPLB may also reorder experts over the ranks by EPLB without replicas, from long-term
// loads. Homes stay here as they are, which is LPLB without reordering (its `update_redundancy_mapping` without a
// workload, but with the experts of a rank sorted). Random rounding of the split to tokens; here it is whole.

#include <optional>
#include <string>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/policy/policy.h"

namespace foremoe::lplb {

// LPLB's topologies: which ranks share an expert.
//
// A topology has `columns` and repeats in groups of consecutive ranks. In column c every rank holds a copy of an expert
// of `source`, another rank of its group, and its own expert of that column is held by exactly one other rank. So a
// copy is an edge between two ranks along which tokens can flow. With G guest slots a rank holds ⌊G / columns⌋ copies
// per column, of experts c, c + columns, … of its source, most loaded first; slots that are left stay empty.
//
//   ring       1 column    groups of 8 where 8 divides the ranks (RING_8P), else one of all ranks
//   cube       2 columns   groups of 8: cycles of four, and diagonals between two of them (CUBE_8P2E)
//   hypercube  2 columns   groups of 16: cycles of four, and cycles of four across them (HYPERCUBE_16P2E)
//   torus      2 columns   all ranks: the same place on the next node, and the next rank on the same node (torus_2d)
//
// All but the ring of other sizes are tables or code of the repository (tests/utils.py of
// https://github.com/deepseek-ai/LPLB).

enum class Edges : std::uint8_t { kAutomatic, kRing, kCube, kHypercube, kTorus };

// Of two columns or more where each rank can hold `copies` of them: hypercube for 16 ranks, cube for 8, torus where
// there are several equal nodes of several ranks, else cube where 8 divides the ranks. Where none of these is defined,
// or for one copy, the ring.
Edges choose_edges(const Topology& topology, int copies);

// Why there is no such topology; nothing when there is. `copies` per rank.
std::optional<std::string> edges_obstacle(Edges edges, const Topology& topology, int copies);

// [rank][column], the rank whose expert is copied. There is no obstacle.
Array<RankId, 2> edge_sources(Edges edges, const Topology& topology);

}  // namespace foremoe::lplb

namespace foremoe {

struct LplbOptions {
  lplb::Edges edges = lplb::Edges::kAutomatic;
};

std::unique_ptr<Policy> make_lplb(const LplbOptions& options = {});

}  // namespace foremoe
