#pragma once

// SmartMoE (Zhai et al., "SmartMoE: Efficiently Training Sparsely-Activated Models through Combining Offline and Online
// Parallelization", USENIX ATC 2023; https://github.com/thu-pacman/SmartMoE-AE): experts permuted over ranks, never
// replicated. Offline a pool of candidates is made; online, now and then, the one that fits recent loads is chosen.
//
// Placing (smartmoe/mapping.py, greedy_gen_mapping_from_history). Experts by load, the largest first, each to the least
// loaded rank that has room; to the rank where it is, when no other is less loaded.
// Online (the same, and layers.py). Every `period` iterations place anew by the loads of the last `window` of them, and
// change to that if its largest rank load is less than that of the current placement.
//
// Read so. The paper's pool is of whole strategies (data, pipeline, expert parallelism) and its artifact leaves the
// choice among them to the user; a plan fixes all but the placement. So the pool is of placements: where experts are,
// the greedy placement by the long-term load, and those by each of pool_parts parts of it, which differ where the load
// drifts. The step begins with the one that fits the long-term load best, and each online choice is among the current
// one, the pool and the greedy one, in that order among equals. The long-term load is the former step's
// (`previous_load`), else this step's, which foresight permits. The artifact's period is an option without a default
// (--dynamic-freq), its window is the two iterations before; both count micro-steps here, as an iteration of the
// artifact is seen through its first micro-batch alone. Ties go to the lowest id.
//
// Without replicas guest slots have no use: a rank holds E/R experts and leaves G slots empty, so that it has less
// memory than others in the same comparison.
//
// Cost. O(E·(log E + R)) per layer and choice.

#include <cstdint>
#include <span>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct SmartMoeOptions {
  int period = 8;      // micro-steps from one choice to the next, ≥ 1
  int window = 2;      // micro-steps whose loads are chosen by, ≥ 1
  int pool_parts = 4;  // of the long-term load, ≥ 1
};

// [expert], rank: the greedy placement by `load`, tokens, of equally many experts on each rank. `current` is [expert].
std::vector<int> smartmoe_placement(std::span<const std::int64_t> load, std::span<const int> current, int num_ranks);

std::unique_ptr<Policy> make_smartmoe(const SmartMoeOptions& options = {});

}  // namespace foremoe
