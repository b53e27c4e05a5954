#pragma once

// SmartMoE (Zhai et al., "SmartMoE: Efficiently Training Sparsely-Activated Models through Combining Offline and Online
// Parallelization", USENIX ATC 2023; https://github.com/thu-pacman/SmartMoE-AE): permutes experts over ranks, without
// replicas. Offline, it builds a pool of candidates. Online, it periodically chooses the one that fits recent loads.
//
// Placement (smartmoe/mapping.py, greedy_gen_mapping_from_history). Assigns experts, largest load first, to the least
// loaded rank with room. An expert stays on its current rank if no other is less loaded.
// Online (same file, and layers.py). Every `period` iterations, compute a placement from the loads of the last `window`
// iterations, and switch to it if its largest rank load is below that of the current placement.
//
// Our reading. The paper's pool contains whole strategies (data, pipeline, expert parallelism), from which the user of
// its artifact chooses. A plan fixes all but the placement, so our pool contains placements: the homes, the greedy
// placement for the long-term load, and the greedy placements for each of its pool_parts parts. These differ if the
// load drifts. The step begins with the placement that fits the long-term load best. Later choices are among the
// current placement, the pool and the new greedy placement; ties go to the first in this order. The long-term load is
// the previous step's (`previous_load`), else this step's, known from recorded routes. The artifact's period is an
// option without a default (--dynamic-freq), its window is the two previous iterations. Both count micro-steps here,
// because the artifact reads only the first micro-batch of an iteration. Ties go to the lowest id.
//
// SmartMoE has no replicas, so guest slots are unused: a rank holds E/R experts and leaves G slots empty. So it needs
// less memory than policies with guests.
//
// Cost. O(E·(log E + R)) per layer and choice.

#include <cstdint>
#include <span>

#include "foremoe/policy/policy.h"

namespace foremoe {

struct SmartMoeOptions {
  int period = 8;      // micro-steps between choices, ≥ 1
  int window = 2;      // recent micro-steps whose loads decide, ≥ 1
  int pool_parts = 4;  // parts of the long-term load, ≥ 1
};

// Returns the greedy placement by `load`, tokens: [expert], rank, with E/R experts per rank. `current` has that shape.
std::vector<int> smartmoe_placement(std::span<const std::int64_t> load, std::span<const int> current, int num_ranks);

std::unique_ptr<Policy> make_smartmoe(const SmartMoeOptions& options = {});

}  // namespace foremoe
