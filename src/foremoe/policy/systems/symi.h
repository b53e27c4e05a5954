#pragma once

// SYMI (Skiadopoulos et al., arXiv 2504.19925, NSDI 2026; first called SwiftMoE): every iteration each expert gets
// replicas in proportion to its tokens in the former iteration. That is free where it was designed: the optimizer state
// is split statically over all ranks, so that new weights must travel to the replicas after every update anyway, and
// may as well travel to others than before.
//
// Counts. E/R + G slots on each of R ranks are given to experts in proportion to their loads, at least one to each:
// rounded down, then one by one taken from the expert that has most too many, or given to the one that has most too
// few, until they fit. Ties go to the lowest id.
// Places. Experts ascending, the replicas of each in consecutive slots, rank by rank. When all experts have about the
// same tokens per replica it does not matter which share a rank, and replicas on one rank reduce their gradients there.
// Tokens. Replicas share evenly.
//
// Inferred. The paper was not at hand, only its abstract and what others write of it: proportion to the former
// iteration, static optimizer shards and even shares are told; rounding and the order of places are ours. So is what an
// iteration is. In the paper it is one batch and one update; in post-training an update comes after many micro-steps,
// and what is placed for is a micro-step. Each is an iteration here, which shows SYMI's idea at its quickest, and at a
// price that it does not pay at home: without an update in between, every change of places is a copy. An iteration may
// be set to more micro-steps. Before the first there is the end of the former step (`previous_load`), else nothing:
// equal loads.
//
// No counterpart in a plan: the optimizer's shards, tokens dropped above an expert's capacity.
//
// Cost. O(E²) per layer and iteration at worst.

#include <cstdint>
#include <span>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct SymiOptions {
  int micro_steps_per_iteration = 1;  // ≥ 1
};

// [expert], at least 1 each, num_slots together; num_slots ≥ experts. Without any load as if it were equal.
std::vector<int> symi_replica_counts(std::span<const std::int64_t> load, int num_slots);

std::unique_ptr<Policy> make_symi(const SymiOptions& options = {});

}  // namespace foremoe
