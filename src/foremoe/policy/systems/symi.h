#pragma once

// SYMI (Skiadopoulos et al., arXiv 2504.19925, NSDI 2026; first called SwiftMoE): every iteration, each expert gets
// replicas in proportion to its tokens in the previous iteration. In the original setting, this costs nothing. The
// optimizer state is split statically over all ranks, so every update sends new weights to the replicas, whose ranks
// may change.
//
// Counts. The R · (E/R + G) slots are divided among experts in proportion to their loads, rounded down, at least one
// each. Until the total is right, one slot is taken from the expert with the largest surplus or given to the expert
// with the largest deficit. Ties go to the lowest id.
// Placement. Replicas fill the slots rank by rank, in ascending order of experts. All experts have about the same
// number of tokens per replica, so any of them may share a rank. Replicas on one rank reduce gradients locally.
// Tokens. Replicas serve equal parts.
//
// Inferred. We had only the paper's abstract and secondary descriptions. They specify counts proportional to the
// previous iteration, static optimizer shards and even shares. We chose the rounding, the order of slots and the
// meaning of an iteration. In the paper, an iteration is one batch and one update. In post-training, one update covers
// many micro-steps, each with a placement, so here each micro-step is an iteration. SYMI then reacts after every
// micro-step. But without an update in between, every change of placement needs copies, which the original avoids. An
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
