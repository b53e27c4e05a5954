#pragma once

// Assignment of sequences to micro-steps and ranks: recorded by the trainer, or balanced by tokens.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/ids.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct Batching {
  int num_micro_steps = 0;
  int num_ranks = 0;
  int ranks_per_node = 0;
  bool recorded = false;                // from the trace
  std::vector<MicroStepId> micro_step;  // [sequences]
  std::vector<RankId> rank;             // [sequences]
};

// The tokens behind a load: their routes, and the rank and micro-step that process them.
struct BatchedTrace {
  RoutingTrace trace;
  Batching batching;
};

// Throws InputError unless the trace is valid and each of its sequences has a micro-step and a rank.
void expect_valid(const Batching& batching, const RoutingTrace& trace);
// Throws InputError, field `batching`, unless ids are in range. `sequences`: their expected number.
void expect_valid(const Batching& batching, std::size_t sequences);

// [micro_step][rank]: Σ length² over the sequences of the batch, tokens².
Array<double, 2> squared_lengths(const BatchedTrace& batched);

// Returns the sequences of `count` ranks from rank `first` on, as ranks 0, 1, …. Copies their routes.
BatchedTrace take_ranks(const BatchedTrace& batched, int first, int count);

// Like those of a LoadTable. take_layers() copies the routes.
BatchedTrace take_layers(const BatchedTrace& batched, int first, int count);
BatchedTrace in_more_micro_steps(BatchedTrace batched, int factor);

struct BatchingOptions {
  int num_ranks = 0;                    // 0: as recorded; an error if no batching was recorded
  int ranks_per_node = 0;               // 0: as recorded, otherwise min(8, ranks)
  std::int64_t tokens_per_rank = 8192;  // maximum tokens per rank and micro-step
};

// Returns the recorded batching if the options specify no rank count or the recorded one; otherwise balances by tokens.
// Throws InputError like balanced_batching(), and also if neither trace nor options specify a rank count.
Batching make_batching(const RoutingTrace& trace, const BatchingOptions& options);

// Distributes sequences first over micro-steps, then over ranks, using Karmarkar–Karp on tokens. Uses the fewest
// micro-steps: if a rank would get more than tokens_per_rank, tries one more. Micro-steps, and ranks within each
// micro-step, are numbered in the order of their first sequences. num_ranks is required. Throws InputError if a
// sequence is longer than tokens_per_rank. `name`: source of the lengths, for messages.
Batching balanced_batching(std::span<const std::int64_t> lengths, const BatchingOptions& options,
                           const std::string& name);

// Throws InputError for invalid options, no rank count, or the first sequence longer than tokens_per_rank.
void expect_fit(std::span<const std::int64_t> lengths, const BatchingOptions& options, const std::string& name);

// Makes this the recorded batching of the trace.
void record_batching(const Batching& batching, RoutingTrace& trace);

// Partitions numbers into k parts with nearly equal sums.
//
// Method: the largest differencing method for k parts (Karmarkar and Karp 1982). Every number starts as a tuple of k
// parts, all empty except one. Repeatedly merges the two tuples with the largest spread (largest minus smallest part),
// combining the largest part of one with the smallest of the other, until one tuple remains. This heuristic gives no
// bound on the largest part; in practice, the spread shrinks like n^(−c·log n), far faster than with greedy placement.
//
// Empty parts are not stored, so memory is O(n); time is O(n · (log n + k log k)). Ties go to the tuple, or part, with
// the lowest item, so the result depends only on the sizes.
//
// Returns the part of each item. Parts are numbered by their lowest item; with fewer items than parts, the last parts
// are empty.
std::vector<int> karmarkar_karp(std::span<const std::int64_t> sizes, int num_parts);

}  // namespace foremoe
