#pragma once

// Packing: which sequences share a micro-step, and on which rank.
//
// Problem. Guests that are chosen once per step serve all micro-steps if every micro-step has the step's mix of
// experts. Dense layers wait for the rank with the most work w: scores of attention cost length², all else length. A
// packing therefore minimises
//
//   Σ over micro-steps m of |d_m|² ÷ Σ over sequences s of |d_s|²
//   + Σ over micro-steps of (max over ranks of Σ w) ÷ Σ over micro-steps of (mean over ranks of Σ w).
//
// The deviation d_s [layer][expert] of a sequence is its tokens minus what they would be with the step's profile: the
// shares of the experts in all tokens of a layer. d_m is the sum over the sequences of micro-step m. The first term
// is 1 in expectation for random micro-steps, and 0 if all have the step's profile. The second is 1 if the ranks of
// every micro-step are equal. Constraints: tokens per rank and micro-step; no sequence leaves its mini-batch; a rank
// with sequences in a micro-step keeps at least one.
//
// Method. Each mini-batch starts as balanced_batching() packs it, which determines its number of micro-steps. A sweep
// visits its sequences in order and applies the change of each that improves most: a move to another cell (a rank in a
// micro-step), or an exchange with a sequence there. Sweeps end at a local optimum, where no change improves.
//
// |d_m|² needs only inner products of deviations. These are computed once, and rounded to integers in units of 2⁻⁴⁰ of
// the objective. From then on the search is exact, and each change lowers the objective, so it ends.
//
// Complexity, for a mini-batch of n sequences: n² / 2 products of vectors of layers · experts, 8 · n² bytes, O(n²) per
// sweep to evaluate moves and exchanges in O(1), and O(n) per change.
//
// Source: RoutePack (arXiv 2608.12146) packs for balance without replicas, by the load of home ranks; deviations from
// the step's profile are ours.

#include <cstdint>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/option.h"
#include "foremoe/core/parallel.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct PackingOptions {
  int num_ranks = 0;                 // must divide the experts
  std::int64_t tokens_per_rank = 0;  // maximum tokens per rank and micro-step
  int num_mini_batches = 1;
  int effort = 0;  // maximum number of sweeps; 0: until no change improves
};

std::vector<Option> options_of(PackingOptions& options);

struct Packing {
  Batching batching;
  std::vector<int> micro_steps;  // [mini_batch], number of micro-steps: the first mini-batch has the first ones
  double objective = 0;          // as above
};

// The length at which scores cost as much as all else in a dense layer, tokens. It is 4,600 in Qwen3-30B-A3B, without
// the output head; modelled steps of packings for 1,024 to 16,384 differ by less than 2 %.
inline constexpr std::int64_t kLinearLength = 4096;

// Work w of the dense layers on a sequence, in units of the scores of one pair of tokens.
constexpr double dense_work(std::int64_t length) {
  return static_cast<double>(length) * static_cast<double>(length + kLinearLength);
}

inline constexpr int kMaxSequencesPerMiniBatch = 1 << 15;  // 8 GiB of products

// Mini-batch k of K consists of the sequences of the k-th of K equal runs of recorded micro-steps, or, if the trace
// records none, of the k-th of K nearly equal runs of sequences. The result depends only on trace and options. Throws
// InputError for malformed routes, a sequence longer than tokens_per_rank, ranks that do not divide the experts,
// mini-batches that do not divide the recorded micro-steps or are more than the sequences, and for mini-batches above
// the limit.
Packing pack(const RoutingTrace& trace, const PackingOptions& options, ThreadPool& pool);

struct PackingFigures {
  double rho_mean = 1;  // over (layer, micro-step) pairs with load, all experts at home
  double rho_max = 1;
  struct Spread {     // sums over micro-steps
    double mean = 0;  // of the mean over ranks
    double max = 0;   // of the maximum over ranks
  };
  Spread attention;  // Σ length², tokens²
  Spread dense;      // Σ dense_work()
};

// `home` [layer][expert].
PackingFigures packing_figures(const BatchedTrace& batched, ArrayView<const RankId, 2> home, ThreadPool& pool);

}  // namespace foremoe
