#pragma once

// Places the replicas of an inference engine for its next window, by the tokens of past windows.
//
// Problem. An engine counts the tokens of every expert in a window, and then places replicas for the next window, which
// is unknown. Each replica serves an equal part of its expert's tokens. Minimise the tokens of the busiest rank in the
// next window. (The planner's `static` chooses guests for known micro-steps and exact quotas instead.)
//
// Method, per layer:
//   forecast  With one window, its tokens. With several, the mean share p of each expert, moved towards the geometric
//             mean of all experts: log p ← B·mean(log p) + (1 − B)·log p. Here s² is the variance of p relative to p²,
//             estimated from the differences between windows, and B = min(1, s² ÷ variance of log p over experts).
//             Experts that were popular by chance are thus expected to be less popular (James and Stein, 1961).
//   start     EPLB's placement of the forecast (eplb.h): number of replicas, groups of experts on nodes.
//   exchange  The busiest rank exchanges one replica with another rank of its node, such that the busier of both has
//             the least load, as long as that is less than before. Two replicas of an expert on one rank are separated
//             first, where an exchange can do that.
//   accept    Layers whose predicted busiest rank is less than 3 % below that of EPLB's placement of the windows' sum
//             keep EPLB's placement: such gains are smaller than the drift between windows.
//   separate  In each node whose ranks have an expert twice: exchange duplicates with other ranks, or replace them by
//             other experts; then exchange and replace until the busiest rank has at most 0.1 % more than before. If
//             that is not reached, duplicates stay, except with `distinct`.
// Load of a rank: the sum of t + λ·t² over its replicas, with t forecast tokens and λ = s·√(ln R ÷ mean over ranks of
// Σ t²). It is 0 for one window. This bounds the expected maximum (Chernoff) if each expert's share deviates
// independently, with relative variance s² in the past and in the next windows.
//
// Guarantee. With one window, the busiest rank has at most 0.1 % more tokens than that of EPLB's placement in this
// window, and no more if EPLB separates the replicas of every expert.
// Nothing is guaranteed for the next window; python/benchmarks/eplb.py measures it.
// Complexity. That of EPLB, and O(replicas · replicas per rank) per exchange; there are at most as many as replicas.
// O(replicas² · replicas per rank) per replacement.

#include "foremoe/policy/systems/eplb.h"

namespace foremoe {

// `windows` is [window][layer][expert], nonnegative tokens in any unit, oldest first, at least one window. `distinct`:
// no rank has two replicas of an expert, unless it has more slots than its node has experts. The busiest rank is then
// not compared with EPLB's. Throws the errors of expect_placeable().
EplbPlacement place_for_next_window(ArrayView<const double, 3> windows, const EplbShape& shape, bool distinct = false);

}  // namespace foremoe
