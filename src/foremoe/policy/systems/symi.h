#pragma once

// SYMI (Skiadopoulos et al., arXiv 2504.19925, NSDI 2026; first called SwiftMoE): every iteration, each expert gets
// replicas in proportion to its tokens in the previous iteration. This is free in its original setting: the optimizer
// state is split statically over all ranks, so new weights travel to the replicas after every update anyway, and can go
// to other ranks than before.
//
// Counts. The R · (E/R + G) slots are divided among experts in proportion to their loads, at least one each: rounded
// down, then slots are taken one by one from the expert with the largest surplus, or given to the one with the largest
// deficit, until the total is right. Ties go to the lowest id.
// Placement. Experts ascending, the replicas of each in consecutive slots, rank by rank. All experts have about the
// same tokens per replica, so it does not matter which share a rank. Replicas on one rank reduce gradients locally.
// Tokens. Replicas serve equal parts.
//
// Inferred. We had only the paper's abstract and secondary descriptions. They specify counts proportional to the
// previous iteration, static optimizer shards and even shares. Rounding and the order of slots are ours, and so is the
// meaning of an iteration. In the paper it is one batch and one update. In post-training, one update covers many
// micro-steps, each with a placement, so each micro-step is an iteration here. SYMI then reacts as fast as it can, but
// pays a price that the original avoids: without an update in between, every change of placement needs copies. An
// option sets more micro-steps per iteration. The first iteration uses the end of the previous step (`previous_load`),
// else equal loads.
//
// Not part of a plan: the optimizer's shards, tokens dropped above an expert's capacity.
//
// Cost. O(E²) per layer and iteration at worst.

#include <cstdint>
#include <span>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct SymiOptions {
  int micro_steps_per_iteration = 1;  // ≥ 1
};

// Returns replica counts, [expert]: ≥ 1 each, num_slots (≥ experts) in total. If all loads are 0, they count as equal.
std::vector<int> symi_replica_counts(std::span<const std::int64_t> load, int num_slots);

std::unique_ptr<Policy> make_symi(const SymiOptions& options = {});

}  // namespace foremoe
