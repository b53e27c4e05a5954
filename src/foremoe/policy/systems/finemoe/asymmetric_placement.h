#pragma once

// FineMoE's asymmetric placement (§6.3): replicas where expected loads call for them.
//
// Problem. From what every expert is expected to serve, choose how many replicas it gets and which ranks hold them, so
// that the largest density of an induced subgraph (eq. 3: what LP 1 can reach) is least.
//
// Method. Two steps, as published:
//   1. counts: one replica each, then again and again one more to the expert with the most tokens per replica (a heap);
//   2. Monte Carlo: of many random placements of these counts the one whose density is least.
// The density of each is found by our exact assignment, which attains ⌈eq. 3⌉; the paper does not say how it computes
// it.
//
// Inferred. An expert gets at most one replica per rank. Ties in step 1 go to the lowest id. How a placement is drawn
// follows the rule of consistent indices (§B.3), by which all replicas of an expert have the same local index on their
// ranks: index by index, ranks in random order are given to the experts of this index one after the other. Experts come
// to indices most replicas first, each to a random one of those that have room for all of its replicas; where none has,
// to one with the most room, and what does not fit goes to the expert with the most tokens per replica of the index
// that has cells left. So no rank holds an expert twice, and no repair is needed. The number of samples is ours; the
// search ends with a sample at ⌈mean⌉, below which there is nothing.
//
// A plan of residency `free` numbers slots in its own way (an expert that stays keeps its slot), so the rule shows in
// which placements are possible, not in slot numbers.
//
// Cost. O(samples · (R · slots + an exact assignment)) per layer.

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

// Step 1. [expert], at least 1 and at most R each, together R · slots_per_rank unless each has R.
std::vector<int> replica_counts(std::span<const std::int64_t> expert_load, const AsymmetricShape& shape);

// One draw of step 2: [rank][local index], kNoExpert where even R replicas of every expert leave cells empty.
Array<ExpertId, 2> draw_placement(std::span<const std::int64_t> expert_load, std::span<const int> counts,
                                  const AsymmetricShape& shape, Random& random);

// ⌈eq. 3⌉: the least largest rank load that a placement permits, in tokens. Every expert is in it.
std::int64_t largest_density(ArrayView<const ExpertId, 2> placement, std::span<const std::int64_t> expert_load);

inline constexpr int kPlacementSamples = 500;

// Both steps.
Array<ExpertId, 2> asymmetric_placement(std::span<const std::int64_t> expert_load, const AsymmetricShape& shape,
                                        Random& random, int num_samples = kPlacementSamples);

// FineMoE's adaptive replacement (§6.4): when the placement no longer fits the loads that are to be expected, place
// anew.
//
// Rule. At every `interval`, predict the loads to come by a moving average of those seen, and evaluate the current
// placement on the prediction by eq. 3. When the largest rank load that it permits is above `threshold` times the mean,
// take a new asymmetric placement for the prediction.
//
// As a plan has it. The paper counts iterations, each of many micro-batches, and a plan is of one step; here the
// interval and the average count micro-steps, so that a long step may replace inside itself. Before the first
// micro-step the prediction is the caller's: the former step's mean, or that of this step, which foresight permits. The
// paper names no threshold; 50 iterations are its recommended interval.

struct ReplacementOptions {
  double threshold = 1.005;  // largest rank load ÷ mean, by eq. 3
  int interval = 50;         // micro-steps, ≥ 1
  int window = 50;           // micro-steps of the moving average, ≥ 1
  int num_samples = kPlacementSamples;
};

// Whether the placement permits no largest rank load of at most ⌈threshold · mean⌉.
bool needs_replacement(ArrayView<const ExpertId, 2> placement, std::span<const std::int64_t> predicted_load,
                       double threshold);

struct ReplacementProblem {
  ArrayView<const std::int64_t, 2> load;         // [micro_step][expert], tokens; looked at only when it has been seen
  std::span<const std::int64_t> predicted_load;  // [expert], before the first micro-step; the unit does not matter
  ArrayView<const ExpertId, 2> initial;          // [rank][slot]; empty: nothing is placed yet
  AsymmetricShape shape;
};

// [micro_step][rank][slot]
Array<ExpertId, 3> replace_adaptively(const ReplacementProblem& problem, const ReplacementOptions& options,
                                      Random& random);

}  // namespace foremoe::finemoe
