#pragma once

// How uneven a load is: stable but skewed over the step, wild from micro-step to micro-step (ForeMoE, figure 4).
// Pure functions of the table; `foremoe inspect` prints them.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

// Of all micro-steps, layers, ranks and experts together: tokens, each as often as it chose an expert.
std::int64_t num_assignments(const LoadTable& table);

// verl's violations over the experts of a layer, with d = load ÷ mean − 1: how far the busiest expert is above the
// mean, the idlest below it (−1: never chosen), and the mean distance. All 0 without load.
struct LoadViolation {
  double max_vio = 0;  // max d
  double min_vio = 0;  // min d
  double avg_vio = 0;  // mean |d|
};
LoadViolation load_violation(std::span<const std::int64_t> expert_loads);

// ρ: max over ranks of load ÷ mean over ranks; 1 without load.
double imbalance_ratio(std::span<const std::int64_t> rank_loads);

struct LayerStatistics {
  LoadViolation step;              // of the whole step's expert loads
  LoadViolation mean_micro_step;   // each figure's mean over the micro-steps with load
  LoadViolation worst_micro_step;  // largest max_vio, smallest min_vio, largest avg_vio
  double step_ratio = 1;           // ρ of the whole step's rank loads, experts at home
  double mean_ratio = 1;           // ρ over the micro-steps with load: mean and largest
  double max_ratio = 1;
  // How much the loads of one expert vary over the micro-steps: the mean over experts of standard deviation ÷ mean,
  // of shares in their micro-step's load, so that micro-steps of unequal size compare. 0: every micro-step alike.
  double fluctuation = 0;
};

// [layer]. `home` is [layer][expert]: the rank that serves an expert when nothing is balanced.
std::vector<LayerStatistics> layer_statistics(const LoadTable& table, ArrayView<const RankId, 2> home);

// ρ of each micro-step, experts at home. [micro_step][layer].
Array<double, 2> imbalance_ratios(const LoadTable& table, ArrayView<const RankId, 2> home);

// The classes of imbalance ratio ρ in which pages and experiments count (layer, micro-step) pairs: from one bound to
// the next. The first bucket begins at 1, the last has no end.
inline constexpr std::array<double, 4> kRhoBounds{1.1, 1.3, 1.5, 2.0};
inline constexpr std::size_t kNumRhoBuckets = kRhoBounds.size() + 1;

// A bound belongs to the bucket that it begins.
inline std::size_t rho_bucket(double rho) {
  return static_cast<std::size_t>(std::ranges::upper_bound(kRhoBounds, rho) - kRhoBounds.begin());
}

}  // namespace foremoe
