#pragma once

// Which sequence runs on which rank in which micro-step: as the trainer recorded it, or balanced by tokens.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/ids.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct Batching {
  int num_micro_steps = 0;
  int num_ranks = 0;
  int ranks_per_node = 0;
  bool recorded = false;                // taken from the trace
  std::vector<MicroStepId> micro_step;  // [sequences]
  std::vector<RankId> rank;             // [sequences]
};

// The tokens behind a load: their routes, and the rank and micro-step that process them.
struct BatchedTrace {
  RoutingTrace trace;
  Batching batching;
};

struct BatchingOptions {
  int num_ranks = 0;                    // 0: as recorded; it is an error when nothing was recorded
  int ranks_per_node = 0;               // 0: as recorded, else min(8, ranks)
  std::int64_t tokens_per_rank = 8192;  // bound on each rank's tokens in one micro-step
};

// Recorded batching when the options ask for no rank count or the same one; otherwise balanced by tokens. Throws
// InputError as balanced_batching, and when neither trace nor options tell the rank count.
Batching make_batching(const RoutingTrace& trace, const BatchingOptions& options);

// The sequences are spread over as few micro-steps as fit, by Karmarkar–Karp on tokens, first over micro-steps, then
// over ranks. No rank gets more than tokens_per_rank: where Karmarkar–Karp does not manage, one more micro-step is
// tried. Micro-steps, and ranks within, come in the order of their first sequence. num_ranks must be given. A
// sequence longer than tokens_per_rank is an InputError; `name` is where lengths come from, for messages.
Batching balanced_batching(std::span<const std::int64_t> lengths, const BatchingOptions& options,
                           const std::string& name);

// Splitting numbers into k parts of nearly equal sums.
//
// Method: the largest differencing method for k parts (Karmarkar and Karp 1982). Every number starts as a tuple of
// k parts, all empty but one. The two tuples of largest spread (largest minus smallest part) are merged, the largest
// part of one with the smallest of the other, until one tuple is left. A heuristic: no bound on the largest part is
// promised; in practice the spread shrinks like n^(−c·log n), far below that of greedy placement.
//
// Empty parts are not stored, so n numbers need memory for n parts; time is O(n · (log n + k log k)).
// Ties go to the tuple, or part, with the lowest item, so the result is a function of the sizes alone.
//
// Returns the part of each item. Parts are numbered by their lowest item; with fewer items than parts the last are
// empty.
std::vector<int> karmarkar_karp(std::span<const std::int64_t> sizes, int num_parts);

}  // namespace foremoe
