#pragma once

// Rollout Collector: converts routes to loads. Counts each sequence as it finishes. Once the micro-step and rank of
// every sequence are known, sums the counts into the load that the planner uses.

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/count_routes.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

// Accepts sequences in any order, from any thread. Routes are not needed after add(): the collector stores one counter
// per (sequence, layer, expert), in the narrowest unsigned type that fits the sequence's largest count.
class RolloutCollector {
 public:
  struct Shape {
    int num_layers = 1;
    int top_k = 1;
    int num_experts = 1;
    int weightless_experts = 0;
    std::vector<int> experts_of_layer = {};
    std::vector<int> top_k_of_layer = {};
  };
  // `name` is for messages and display. Throws InputError, field `shape`, if a number is not positive or too large.
  explicit RolloutCollector(const Shape& shape, std::string name = {});

  // Adds one finished sequence, routes [token][layer][top_k]. Throws InputError and stores nothing if the sequence
  // number was already used, the bytes are not a whole number of tokens, or a row is malformed.
  void add(int sequence, RouteType type, std::span<const std::byte> routes);

  std::size_t num_sequences() const;
  std::size_t bytes_of_counts() const;

  // Lengths in tokens of sequences 0, 1, …, as needed for batching. Throws InputError if a sequence is missing.
  std::vector<std::int64_t> sequence_lengths() const;

  // Throws InputError unless the batching is valid and covers exactly the finished sequences.
  LoadTable to_load_table(const Batching& batching) const;

 private:
  using Counts = std::variant<std::vector<std::uint8_t>, std::vector<std::uint16_t>, std::vector<std::uint32_t>,
                              std::vector<std::uint64_t>>;
  struct Sequence {
    std::int64_t num_tokens = 0;
    std::int64_t uncounted = 0;  // entries, as RouteCounter has them
    Counts counts;               // [layer][expert]
  };
  static Counts narrowest(std::span<const std::int64_t> counts);
  void require_sequences(std::size_t n) const;

  Shape shape_;
  std::string name_;
  mutable std::mutex mutex_;
  std::map<int, Sequence> sequences_;  // guarded by mutex_; entries never change after insertion
};

// Counts a whole trace in one sweep, in parallel over (micro-step, rank). Sets `tokens` and `missing_rows` too. Throws
// the errors of expect_valid(batching, trace), and InputError for the first malformed row, independent of the number of
// threads.
LoadTable collect(const RoutingTrace& trace, const Batching& batching, ThreadPool& pool);

}  // namespace foremoe
