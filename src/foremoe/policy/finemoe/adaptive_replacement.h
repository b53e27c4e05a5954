#pragma once

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

#include "foremoe/policy/finemoe/asymmetric_placement.h"

namespace foremoe::finemoe {

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
