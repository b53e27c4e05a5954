#pragma once

// The Rollout Collector: from routes to loads. Sequences are counted as they finish; once it is known which
// micro-step and rank runs each, their counts become the load that the planner works on.

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

// Takes sequences in any order, from any thread. Routes may be forgotten after add(): what stays is one counter per
// (sequence, layer, expert), each sequence's in the narrowest unsigned type that holds its largest count.
class RolloutCollector {
 public:
  struct Shape {
    int num_layers = 1;
    int top_k = 1;
    int num_experts = 1;
  };
  // `name` is for messages and display.
  explicit RolloutCollector(const Shape& shape, std::string name = {});

  // One finished sequence, routes [token][layer][top_k]. Throws InputError when the number was used before, the
  // bytes are no whole number of tokens, or a row is malformed; then nothing is kept.
  void add(int sequence, RouteType type, std::span<const std::byte> routes);

  std::size_t num_sequences() const;
  std::size_t bytes_of_counts() const;

  // Tokens of sequences 0, 1, …: what batching by tokens needs. Throws InputError when a number is missing.
  std::vector<std::int64_t> sequence_lengths() const;

  // Throws InputError unless the batching speaks of exactly the sequences that finished.
  LoadTable to_load_table(const Batching& batching) const;

 private:
  using Counts = std::variant<std::vector<std::uint8_t>, std::vector<std::uint16_t>, std::vector<std::uint32_t>,
                              std::vector<std::uint64_t>>;
  struct Sequence {
    std::int64_t num_tokens = 0;
    Counts counts;  // [layer][expert]
  };
  static Counts narrowest(std::span<const std::int64_t> counts);
  void require_sequences(std::size_t n) const;

  Shape shape_;
  std::string name_;
  mutable std::mutex mutex_;
  std::map<int, Sequence> sequences_;  // guarded by mutex_; entries do not change once there
};

// Straight from a trace, which is swept once, in parallel over (micro-step, rank). Throws InputError for the first
// malformed row of the trace, whatever the number of threads.
LoadTable collect(const RoutingTrace& trace, const Batching& batching, ThreadPool& pool);

}  // namespace foremoe
