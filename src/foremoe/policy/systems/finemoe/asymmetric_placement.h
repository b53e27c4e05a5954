#pragma once

// FineMoE's asymmetric placement (§6.3): places replicas by expected loads.
//
// Problem. From expected loads, choose each expert's number of replicas and their ranks. Minimise the largest density
// of an induced subgraph (eq. 3, the optimum of LP 1).
//
// Method. Two steps, as published:
//   1. counts: one replica each, then repeatedly one more for the expert with the most tokens per replica (a heap);
//   2. Monte Carlo: among many random placements of these counts, the one with the least density.
// Our exact assignment, which attains ⌈eq. 3⌉, computes each density; the paper does not specify a method.
//
// Inferred. An expert gets at most one replica per rank. Ties in step 1 go to the lowest id. Random placements follow
// the rule of consistent indices (§B.3): all replicas of an expert have the same local index on their ranks. Each
// expert, most replicas first, takes a random index with room for all of its replicas. If there is none, it takes the
// index with the most room and loses the replicas that do not fit. Any cells still free at an index go to the expert at
// that index with the most tokens per replica. Then each index deals the ranks to its experts in random order. Thus no
// rank holds an expert twice. We chose the number of samples. Sampling ends at a density of ⌈mean⌉, the lower bound.
//
// In a plan of residency `free`, an expert that stays keeps its slot. So the rule restricts placements, but not slot
// numbers.
//
// Complexity. O(samples · (R · slots + an exact assignment)) per layer.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/random.h"

namespace foremoe::finemoe {

struct AsymmetricShape {
  int num_ranks = 1;
  int slots_per_rank = 1;  // E/R + G
};

// Step 1. Returns replica counts, [expert]: 1 to R each, R · slots_per_rank in total unless all experts have R.
std::vector<int> replica_counts(std::span<const std::int64_t> expert_load, const AsymmetricShape& shape);

// Draws one sample of step 2: [rank][local index]. Cells are kNoExpert if R replicas of every expert do not fill them.
Array<ExpertId, 2> draw_placement(std::span<const std::int64_t> expert_load, std::span<const int> counts,
                                  const AsymmetricShape& shape, Random& random);

// Returns ⌈eq. 3⌉: the smallest maximum rank load that a placement of all experts permits, in tokens.
std::int64_t largest_density(ArrayView<const ExpertId, 2> placement, std::span<const std::int64_t> expert_load);

inline constexpr int kPlacementSamples = 500;

// Runs both steps.
Array<ExpertId, 2> asymmetric_placement(std::span<const std::int64_t> expert_load, const AsymmetricShape& shape,
                                        Random& random, int num_samples = kPlacementSamples);

// FineMoE's adaptive replacement (§6.4): computes a new placement if the current one no longer balances expected loads.
//
// Rule. At every `interval`, predict the coming loads with a moving average of past loads, and evaluate the current
// placement on the prediction with eq. 3. If its minimum largest rank load exceeds `threshold` times the mean, compute
// a new asymmetric placement for the prediction.
//
// As a plan. The paper counts iterations of many micro-batches, but a plan covers one step. Here, interval and window
// count micro-steps, so a long step may replace its placement. Before the first micro-step, the caller provides the
// prediction: the previous step's mean, or this step's, known from recorded routes. The paper gives no threshold, and
// recommends an interval of 50 iterations.

struct ReplacementOptions {
  double threshold = 1.005;  // largest rank load ÷ mean, by eq. 3
  int interval = 50;         // micro-steps, ≥ 1
  int window = 50;           // micro-steps in the moving average, ≥ 1
  int num_samples = kPlacementSamples;
};

// Returns whether the smallest maximum rank load that the placement permits is above ⌈threshold · mean⌉.
bool needs_replacement(ArrayView<const ExpertId, 2> placement, std::span<const std::int64_t> predicted_load,
                       double threshold);

struct ReplacementProblem {
  ArrayView<const std::int64_t, 2> load;         // [micro_step][expert], tokens; only past micro-steps are read
  std::span<const std::int64_t> predicted_load;  // [expert], before the first micro-step, in any unit
  ArrayView<const ExpertId, 2> initial;          // [rank][slot]; empty: no placement so far
  AsymmetricShape shape;
};

// Returns [micro_step][rank][slot].
Array<ExpertId, 3> replace_adaptively(const ReplacementProblem& problem, const ReplacementOptions& options,
                                      Random& random);

}  // namespace foremoe::finemoe
