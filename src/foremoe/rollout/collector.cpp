#include "foremoe/rollout/collector.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_statistics.h"

namespace foremoe {

namespace {

// Shape: RoutingTrace or RolloutCollector::Shape.
template <class Shape>
LoadTable empty_table(const Batching& batching, const Shape& shape, const std::string& name) {
  const auto extent = [](int n) { return static_cast<std::size_t>(n); };
  const std::array counts{extent(batching.num_micro_steps), extent(shape.num_layers), extent(batching.num_ranks),
                          extent(shape.num_experts)};
  expect_load_shape(counts, name);
  return {.load = Array<Tokens, 4>(counts),
          .top_k = shape.top_k,
          .ranks_per_node = batching.ranks_per_node,
          .name = name,
          .experts_of_layer = shape.experts_of_layer,
          .top_k_of_layer = shape.top_k_of_layer,
          .tokens = Array<Tokens, 2>({extent(batching.num_micro_steps), extent(batching.num_ranks)})};
}

// Sets missing_rows. uncounted: of all sequences.
void count_missing_rows(std::int64_t uncounted, LoadTable& table) {
  for (const Tokens tokens : table.tokens.flat()) table.missing_rows += tokens.value * table.num_layers();
  table.missing_rows -= (num_assignments(table) + uncounted) / table.top_k;
}

}  // namespace

RolloutCollector::RolloutCollector(const Shape& shape, std::string name) : shape_(shape), name_(std::move(name)) {
  if (shape.num_layers >= 1 && shape.top_k >= 1 && shape.top_k <= shape.num_experts &&
      shape.num_experts <= kMaxExperts && std::int64_t{shape.num_layers} * shape.num_experts <= kMaxLoadCells) {
    expect_memory(8.0 * shape.num_layers * shape.num_experts,
                  {.file = name_, .field = "shape"});  // int64 of a sequence
    return;
  }
  throw InputError({.file = name_, .field = "shape"},
                   fmt::format("{} layers, top-k {} and {} experts", shape.num_layers, shape.top_k, shape.num_experts));
}

void RolloutCollector::add(int sequence, RouteType type, std::span<const std::byte> routes) {
  const RouteShape shape = route_shape(type, shape_);
  const auto fail = [&](std::string index, const std::string& what) {
    throw InputError({.file = name_, .field = fmt::format("sequence {}", sequence), .index = std::move(index)}, what);
  };
  if (sequence < 0) fail("", "sequences are numbered from 0");
  if (const std::int64_t ids = sentinel_of(type); ids > 0 && shape_.num_experts + shape_.weightless_experts > ids) {
    fail("", fmt::format("its type cannot represent {} experts and rows without a route",
                         shape_.num_experts + shape_.weightless_experts));
  }
  if (routes.size() % shape.token_bytes() != 0) {
    fail("", fmt::format("has {} bytes; expected a multiple of the {} bytes of a token", routes.size(),
                         shape.token_bytes()));
  }
  const auto num_tokens = static_cast<std::int64_t>(routes.size() / shape.token_bytes());
  const auto experts = static_cast<std::size_t>(shape_.num_experts);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(shape_.num_layers) * experts);
  RouteCounter counter(shape);
  if (!counter.count(routes.data(), num_tokens, counts.data(), experts)) {
    const auto fault = find_fault(shape, routes.data(), num_tokens);
    if (!fault) fail("", kRoutesChanged);
    fail(fmt::format("[{}, {}, {}]", fault->token, fault->layer, fault->entry), fault->what);
  }
  Sequence finished{.num_tokens = num_tokens, .uncounted = counter.uncounted(), .counts = narrowest(counts)};
  const std::scoped_lock lock(mutex_);
  if (!sequences_.emplace(sequence, std::move(finished)).second) fail("", "finished twice");
}

RolloutCollector::Counts RolloutCollector::narrowest(std::span<const std::int64_t> counts) {
  const auto largest = static_cast<std::uint64_t>(std::ranges::max(counts));
  const auto copy = [&]<class T>(std::type_identity<T>) {
    std::vector<T> narrow(counts.size());
    std::ranges::transform(counts, narrow.begin(), [](std::int64_t n) { return static_cast<T>(n); });
    return Counts(std::move(narrow));
  };
  if (largest <= std::numeric_limits<std::uint8_t>::max()) return copy(std::type_identity<std::uint8_t>{});
  if (largest <= std::numeric_limits<std::uint16_t>::max()) return copy(std::type_identity<std::uint16_t>{});
  if (largest <= std::numeric_limits<std::uint32_t>::max()) return copy(std::type_identity<std::uint32_t>{});
  return copy(std::type_identity<std::uint64_t>{});
}

std::size_t RolloutCollector::num_sequences() const {
  const std::scoped_lock lock(mutex_);
  return sequences_.size();
}

std::size_t RolloutCollector::bytes_of_counts() const {
  const std::scoped_lock lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [number, sequence] : sequences_) {
    std::visit([&](const auto& counts) { bytes += counts.size() * sizeof(counts[0]); }, sequence.counts);
  }
  return bytes;
}

void RolloutCollector::require_sequences(std::size_t n) const {
  std::size_t expected = 0;
  for (const auto& [number, sequence] : sequences_) {
    if (static_cast<std::size_t>(number) != expected) break;
    ++expected;
  }
  if (expected < n || sequences_.size() > n) {
    const bool missing = expected < n;
    throw InputError({.file = name_, .field = fmt::format("sequence {}", missing ? expected : n)},
                     missing ? "has not finished" : fmt::format("is not among the {} of the batching", n));
  }
}

std::vector<std::int64_t> RolloutCollector::sequence_lengths() const {
  const std::scoped_lock lock(mutex_);
  require_sequences(sequences_.size());
  std::vector<std::int64_t> lengths;
  for (const auto& [number, sequence] : sequences_) lengths.push_back(sequence.num_tokens);
  return lengths;
}

LoadTable RolloutCollector::to_load_table(const Batching& batching) const {
  const std::scoped_lock lock(mutex_);
  expect_valid(batching, batching.rank.size());
  require_sequences(batching.rank.size());
  LoadTable table = empty_table(batching, shape_, name_);
  std::int64_t uncounted = 0;
  for (const auto& [number, sequence] : sequences_) {
    const auto s = static_cast<std::size_t>(number);
    std::visit(
        [&](const auto& counts) {
          auto count = counts.begin();
          for (int l = 0; l < shape_.num_layers; ++l) {
            for (Tokens& load : table.load.row(batching.micro_step[s], l, batching.rank[s])) load += Tokens{*count++};
          }
        },
        sequence.counts);
    table.tokens(batching.micro_step[s], batching.rank[s]) += Tokens{sequence.num_tokens};
    uncounted += sequence.uncounted;
  }
  count_missing_rows(uncounted, table);
  return table;
}

LoadTable collect(const RoutingTrace& trace, const Batching& batching, ThreadPool& pool) {
  expect_valid(batching, trace);
  LoadTable table = empty_table(batching, trace, trace.name);
  const RouteShape shape = shape_of(trace);
  const auto num_ranks = static_cast<std::size_t>(batching.num_ranks);

  // Each task owns the cells of one (micro-step, rank), so tasks never write to the same cell.
  std::vector<std::vector<int>> sequences_of(static_cast<std::size_t>(batching.num_micro_steps) * num_ranks);
  for (int s = 0; s < trace.num_sequences(); ++s) {
    const auto i = static_cast<std::size_t>(s);
    sequences_of[batching.micro_step[i].index() * num_ranks + batching.rank[i].index()].push_back(s);
    table.tokens(batching.micro_step[i], batching.rank[i]) += Tokens{trace.sequence_length(s)};
  }
  std::vector<std::unique_ptr<RouteCounter>> counters(pool.num_threads());
  std::atomic<bool> malformed = false;
  pool.for_each_index(sequences_of.size(), [&](std::size_t cell, std::size_t worker) {
    if (!counters[worker]) counters[worker] = std::make_unique<RouteCounter>(shape);
    static_assert(sizeof(Tokens) == sizeof(std::int64_t));
    std::int64_t* const counts = &table.load(cell / num_ranks, 0, cell % num_ranks, 0).value;
    const std::size_t layer_stride = num_ranks * table.load.extent(3);
    for (const int s : sequences_of[cell]) {
      const auto first = static_cast<std::size_t>(trace.cu_seqlens[static_cast<std::size_t>(s)]);
      const std::byte* const routes = trace.routes + first * shape.token_bytes();
      if (!counters[worker]->count(routes, trace.sequence_length(s), counts, layer_stride)) malformed = true;
    }
  });
  if (malformed) refuse_routes(trace);  // throws for the first malformed row in file order
  std::int64_t uncounted = 0;
  for (const auto& counter : counters) uncounted += counter ? counter->uncounted() : 0;
  count_missing_rows(uncounted, table);
  return table;
}

}  // namespace foremoe
