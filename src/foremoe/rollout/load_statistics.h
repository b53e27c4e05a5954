#pragma once

// Imbalance statistics of a load, printed by `foremoe inspect`. All are pure functions of the table. Over a step, loads
// are typically skewed and similar to the previous step's. They vary strongly between micro-steps (ForeMoE, figure 4).

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

// Number of assignments over all micro-steps, layers, ranks and experts. Each token counts once per chosen expert.
std::int64_t num_assignments(const LoadTable& table);

// Mean tokens of a rank in one micro-step. A token counts once, not once per chosen expert. If LoadTable::tokens is
// unknown, excludes rows without a route.
Tokens mean_tokens_per_rank(const LoadTable& table);

// verl's load violations over the experts of a layer, with d = load ÷ mean − 1: the largest d, the smallest d (−1: an
// expert was never chosen), and the mean |d|. All 0 without load.
struct LoadViolation {
  double max_vio = 0;  // max d
  double min_vio = 0;  // min d
  double avg_vio = 0;  // mean |d|
};
LoadViolation load_violation(std::span<const std::int64_t> expert_loads);

// Imbalance ratio ρ: max over ranks of load ÷ mean over ranks; 1 without load.
double imbalance_ratio(std::span<const std::int64_t> rank_loads);

struct LayerStatistics {
  LoadViolation step;              // expert loads of the whole step
  LoadViolation mean_micro_step;   // mean of each value over the micro-steps with load
  LoadViolation worst_micro_step;  // largest max_vio, smallest min_vio, largest avg_vio
  double step_ratio = 1;           // ρ of the whole step's rank loads, all experts at home
  double mean_ratio = 1;           // mean ρ over the micro-steps with load; max_ratio: largest ρ
  double max_ratio = 1;
  // Variation of expert loads between micro-steps: mean over chosen experts of standard deviation ÷ mean. Uses shares
  // of each micro-step's load, so that micro-steps of different sizes are comparable. 0: all micro-steps equal.
  double fluctuation = 0;
};

// Returns statistics per [layer]. `home` [layer][expert]: rank that serves an expert without balancing.
std::vector<LayerStatistics> layer_statistics(const LoadTable& table, ArrayView<const RankId, 2> home);

// Load of each expert ÷ mean over the experts of its layer, [layer][expert]; 0 in layers without load.
struct ExpertHeat {
  Array<double, 2> step;    // of the whole step's loads
  Array<double, 2> steady;  // reached in at least three quarters of the micro-steps with load
};
ExpertHeat expert_heat(const LoadTable& table);

// Bounds of load ÷ mean at which the colour of a map changes, in `inspect --plot` and `report`.
inline constexpr std::array<double, 8> kHeatBounds{0.5, 0.8, 0.95, 1.05, 1.25, 1.5, 2, 3};

// ρ of each micro-step, all experts at home: [micro_step][layer].
Array<double, 2> imbalance_ratios(const LoadTable& table, ArrayView<const RankId, 2> home);

// Bounds of the ρ buckets in which documents and experiments count (layer, micro-step) pairs. The first bucket begins
// at 1; the last has no upper bound.
inline constexpr std::array<double, 4> kRhoBounds{1.1, 1.3, 1.5, 2.0};
inline constexpr std::size_t kNumRhoBuckets = kRhoBounds.size() + 1;

// Each bound belongs to the bucket above it.
inline std::size_t rho_bucket(double rho) {
  return static_cast<std::size_t>(std::ranges::upper_bound(kRhoBounds, rho) - kRhoBounds.begin());
}

}  // namespace foremoe
