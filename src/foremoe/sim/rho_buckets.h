#pragma once

// The classes of imbalance ρ, largest rank load ÷ mean, in which pages and experiments count (layer, micro-step) pairs.

#include <algorithm>
#include <array>
#include <cstddef>

namespace foremoe {

// ρ from one bound to the next; the first bucket begins at 1, the last has no end.
inline constexpr std::array<double, 4> kRhoBounds{1.1, 1.3, 1.5, 2.0};
inline constexpr std::size_t kNumRhoBuckets = kRhoBounds.size() + 1;

// A bound belongs to the bucket that it begins.
inline std::size_t rho_bucket(double rho) {
  return static_cast<std::size_t>(std::ranges::upper_bound(kRhoBounds, rho) - kRhoBounds.begin());
}

}  // namespace foremoe
