#pragma once

// LPLB (DeepSeek, https://github.com/deepseek-ai/LPLB): a linear-programming load balancer. Every replica is an edge
// between two ranks of a fixed topology (lplb/replica_edges.h); in every micro-step the tokens of the replicated
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

#include "foremoe/policy/lplb/replica_edges.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

struct LplbOptions {
  lplb::Edges edges = lplb::Edges::kAutomatic;
};

std::unique_ptr<Policy> make_lplb(const LplbOptions& options = {});

}  // namespace foremoe
