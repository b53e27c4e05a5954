#include "foremoe/rollout/batching.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {

namespace {

constexpr int kNone = -1;

// A part is a list of items, linked through `next`.
struct Part {
  std::int64_t size = 0;
  int first = kNone;
  int last = kNone;
  int lowest = kNone;  // lowest item, for ties

  friend bool operator<(const Part& a, const Part& b) {  // larger parts first
    return a.size != b.size ? a.size > b.size : a.lowest < b.lowest;
  }
};

struct Tuple {
  std::vector<Part> parts;  // larger first; the remaining num_parts − parts.size() are empty
  std::int64_t spread = 0;
  int lowest = kNone;  // lowest item
};

struct LessUrgent {
  bool operator()(const Tuple& a, const Tuple& b) const {
    return a.spread != b.spread ? a.spread < b.spread : a.lowest > b.lowest;
  }
};

// Merges the i-th largest part of a with the i-th smallest part of b.
Tuple merge_tuples(Tuple a, Tuple b, std::size_t num_parts, std::vector<int>& next) {
  if (a.parts.size() < b.parts.size()) std::swap(a.parts, b.parts);
  for (std::size_t j = 0; j < b.parts.size(); ++j) {
    const std::size_t i = num_parts - 1 - j;
    if (i >= a.parts.size()) {
      a.parts.push_back(b.parts[j]);
      continue;
    }
    Part& to = a.parts[i];
    const Part& from = b.parts[j];
    next[static_cast<std::size_t>(to.last)] = from.first;
    to = {
        .size = to.size + from.size, .first = to.first, .last = from.last, .lowest = std::min(to.lowest, from.lowest)};
  }
  std::ranges::sort(a.parts, std::less<>{});
  a.spread = a.parts.front().size - (a.parts.size() < num_parts ? 0 : a.parts.back().size);
  a.lowest = std::min(a.lowest, b.lowest);
  return a;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Lower bound on the number of bins of this capacity (Martello and Toth's bound L2). Every item above half the capacity
// needs its own bin. For each threshold t, no item of at least t fits in a bin with an item above capacity − t. The
// other items of at least t fill the other bins, then new bins. Items must not exceed the capacity.
std::int64_t least_bins(std::vector<std::int64_t> sizes, std::int64_t capacity) {
  std::ranges::sort(sizes, std::greater<>{});
  std::vector<std::int64_t> sum(sizes.size() + 1, 0);  // [n]: sum of the n largest
  std::partial_sum(sizes.begin(), sizes.end(), sum.begin() + 1);
  const auto num_such = [&](auto&& large_enough) {
    return std::ranges::partition_point(sizes, large_enough) - sizes.begin();
  };
  const std::int64_t large = num_such([&](std::int64_t s) { return 2 * s > capacity; });
  std::int64_t bins = std::max(large, ceil_div(sum.back(), capacity));
  for (std::size_t i = static_cast<std::size_t>(large); i < sizes.size(); ++i) {
    const std::int64_t t = sizes[i];
    if (i + 1 < sizes.size() && sizes[i + 1] == t) continue;  // visit only the last of equal sizes
    const std::int64_t whole = num_such([&](std::int64_t s) { return s > capacity - t; });
    const std::int64_t free =
        (large - whole) * capacity - (sum[static_cast<std::size_t>(large)] - sum[static_cast<std::size_t>(whole)]);
    const std::int64_t small = sum[i + 1] - sum[static_cast<std::size_t>(large)];
    bins = std::max(bins, large + std::max<std::int64_t>(0, ceil_div(small - free, capacity)));
  }
  return bins;
}

// Distributes sequences over micro-steps and their ranks. Returns nullopt if a rank exceeds tokens_per_rank.
std::optional<Batching> try_micro_steps(std::span<const std::int64_t> lengths, int num_micro_steps, int num_ranks,
                                        std::int64_t tokens_per_rank) {
  const std::vector<int> micro_step = karmarkar_karp(lengths, num_micro_steps);
  std::vector<std::vector<std::size_t>> members(static_cast<std::size_t>(num_micro_steps));
  for (std::size_t s = 0; s < lengths.size(); ++s) members[static_cast<std::size_t>(micro_step[s])].push_back(s);

  Batching batching{.num_micro_steps = num_micro_steps, .num_ranks = num_ranks, .micro_step = {}, .rank = {}};
  for (const int m : micro_step) batching.micro_step.emplace_back(m);
  batching.rank.resize(lengths.size());
  for (const std::vector<std::size_t>& sequences : members) {
    std::vector<std::int64_t> sizes;
    for (const std::size_t s : sequences) sizes.push_back(lengths[s]);
    const std::vector<int> rank = karmarkar_karp(sizes, num_ranks);
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(num_ranks), 0);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      std::int64_t& of_rank = tokens[static_cast<std::size_t>(rank[i])];
      of_rank += sizes[i];
      if (of_rank > tokens_per_rank) return std::nullopt;
      batching.rank[sequences[i]] = RankId{rank[i]};
    }
  }
  return batching;
}

void check(const BatchingOptions& options) {
  const auto expect = [](const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least || value > most) {
      throw InputError({.field = field}, fmt::format("{} (is {})", must_be_integer(least, most), value));
    }
  };
  expect("ranks", options.num_ranks, 0, kMaxRanks);
  expect("ranks_per_node", options.ranks_per_node, 0, kMaxRanks);
  expect("tokens_per_rank", options.tokens_per_rank, 1, kMaxTokensPerLayer);
}

}  // namespace

std::vector<int> karmarkar_karp(std::span<const std::int64_t> sizes, int num_parts) {
  if (num_parts < 1) throw InputError({.field = "num_parts"}, "must be at least 1");
  std::vector<int> part_of(sizes.size());
  if (sizes.empty() || num_parts == 1) return part_of;
  const auto k = static_cast<std::size_t>(num_parts);
  std::vector<int> next(sizes.size(), kNone);
  std::vector<Tuple> heap;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const int item = static_cast<int>(i);
    heap.push_back({.parts = {{.size = sizes[i], .first = item, .last = item, .lowest = item}},
                    .spread = sizes[i],
                    .lowest = item});
  }
  std::ranges::make_heap(heap, LessUrgent{});
  const auto pop = [&] {
    std::ranges::pop_heap(heap, LessUrgent{});
    Tuple top = std::move(heap.back());
    heap.pop_back();
    return top;
  };
  while (heap.size() > 1) {
    Tuple first = pop();
    heap.push_back(merge_tuples(std::move(first), pop(), k, next));
    std::ranges::push_heap(heap, LessUrgent{});
  }
  std::vector<Part>& parts = heap.front().parts;
  std::ranges::sort(parts, {}, &Part::lowest);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (int item = parts[p].first; item != kNone; item = next[static_cast<std::size_t>(item)]) {
      part_of[static_cast<std::size_t>(item)] = static_cast<int>(p);
    }
  }
  return part_of;
}

void expect_valid(const Batching& batching, std::size_t sequences) {
  const auto refuse = [](const std::string& what) { throw InputError({.field = "batching"}, what); };
  const auto& [micro_steps, ranks, ranks_per_node, recorded, micro_step, rank] = batching;
  if (micro_steps < 1 || ranks < 1 || ranks > kMaxRanks || ranks_per_node < 1) {
    refuse(fmt::format("has {} micro-steps, {} ranks and {} per node", micro_steps, ranks, ranks_per_node));
  }
  if (micro_step.size() != sequences || rank.size() != sequences) {
    refuse(fmt::format("has {} micro-steps and {} ranks of {} sequences", micro_step.size(), rank.size(), sequences));
  }
  for (std::size_t s = 0; s < sequences; ++s) {
    if (micro_step[s].index() < static_cast<std::size_t>(micro_steps) &&
        rank[s].index() < static_cast<std::size_t>(ranks)) {
      continue;
    }
    refuse(fmt::format("sequence {} is in micro-step {} of {} on rank {} of {}", s, micro_step[s].value, micro_steps,
                       rank[s].value, ranks));
  }
}

void expect_valid(const Batching& batching, const RoutingTrace& trace) {
  expect_valid(trace);
  expect_valid(batching, static_cast<std::size_t>(trace.num_sequences()));
}

Batching make_batching(const RoutingTrace& trace, const BatchingOptions& options) {
  expect_valid(trace);
  check(options);
  const int ranks = trace.ranks == 0 && trace.has_batching() ? 1 + std::ranges::max(trace.rank) : trace.ranks;
  if (trace.has_batching() && (options.num_ranks == 0 || options.num_ranks == ranks)) {
    Batching batching{.num_micro_steps = 1 + *std::ranges::max_element(trace.micro_step),
                      .num_ranks = ranks,
                      .ranks_per_node = options.ranks_per_node != 0 ? options.ranks_per_node : trace.ranks_per_node,
                      .recorded = true,
                      .micro_step = {},
                      .rank = {}};
    if (batching.ranks_per_node == 0) batching.ranks_per_node = kDefaultRanksPerNode;
    batching.ranks_per_node = std::min(batching.ranks_per_node, batching.num_ranks);
    for (const std::int32_t m : trace.micro_step) batching.micro_step.emplace_back(m);
    for (const std::int32_t r : trace.rank) batching.rank.emplace_back(r);
    return batching;
  }
  std::vector<std::int64_t> lengths;
  for (int s = 0; s < trace.num_sequences(); ++s) lengths.push_back(trace.sequence_length(s));
  return balanced_batching(lengths, options, trace.name);
}

void expect_fit(std::span<const std::int64_t> lengths, const BatchingOptions& options, const std::string& name) {
  check(options);
  if (options.num_ranks == 0) {
    throw InputError({.file = name}, "no batching was recorded: give the number of `ranks`");
  }
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    if (lengths[s] < 0)
      throw InputError({.file = name, .field = fmt::format("sequence {}", s)}, "has a negative length");
    if (lengths[s] > options.tokens_per_rank) {
      throw InputError(
          {.file = name, .field = "cu_seqlens", .index = fmt::format("[{}]", s)},
          fmt::format(
              "a sequence of {} tokens exceeds the limit of {} per rank and micro-step (`tokens_per_rank`); the "
              "longest has {}",
              lengths[s], options.tokens_per_rank, std::ranges::max(lengths)));
    }
  }
}

Batching balanced_batching(std::span<const std::int64_t> lengths, const BatchingOptions& options,
                           const std::string& name) {
  expect_fit(lengths, options, name);
  const std::int64_t bins = least_bins({lengths.begin(), lengths.end()}, options.tokens_per_rank);
  int micro_steps = static_cast<int>(std::max<std::int64_t>(1, ceil_div(bins, options.num_ranks)));
  // Terminates at the latest with one micro-step per sequence, which always fits.
  auto batching = try_micro_steps(lengths, micro_steps, options.num_ranks, options.tokens_per_rank);
  while (!batching) {
    batching = try_micro_steps(lengths, ++micro_steps, options.num_ranks, options.tokens_per_rank);
  }
  batching->ranks_per_node = options.ranks_per_node != 0 ? options.ranks_per_node : kDefaultRanksPerNode;
  batching->ranks_per_node = std::min(batching->ranks_per_node, options.num_ranks);
  return *batching;
}

BatchedTrace take_ranks(const BatchedTrace& batched, int first, int count) {
  const auto& [trace, batching] = batched;
  BatchedTrace part{.trace = trace,
                    .batching = {.num_micro_steps = batching.num_micro_steps,
                                 .num_ranks = count,
                                 .ranks_per_node = std::min(batching.ranks_per_node, count),
                                 .recorded = batching.recorded}};
  RoutingTrace& to = part.trace;
  to.cu_seqlens = {0};
  to.prompt_lengths.clear();
  to.group_ids.clear();
  const std::size_t token_bytes =
      static_cast<std::size_t>(trace.num_layers) * static_cast<std::size_t>(trace.top_k) * size_of(trace.type);
  const double part_of_ranks = 1.0 * count / batching.num_ranks;
  expect_memory(part_of_ranks * static_cast<double>(trace.num_tokens) * static_cast<double>(token_bytes),
                {.file = trace.name});
  const auto routes = std::make_shared<std::vector<std::byte>>();
  for (std::size_t s = 0; s < batching.rank.size(); ++s) {
    const int rank = batching.rank[s].value - first;
    if (rank < 0 || rank >= count) continue;
    const std::byte* const from = trace.routes + static_cast<std::size_t>(trace.cu_seqlens[s]) * token_bytes;
    const std::int64_t tokens = trace.sequence_length(static_cast<int>(s));
    routes->insert(routes->end(), from, from + static_cast<std::size_t>(tokens) * token_bytes);
    to.cu_seqlens.push_back(to.cu_seqlens.back() + tokens);
    if (!trace.prompt_lengths.empty()) to.prompt_lengths.push_back(trace.prompt_lengths[s]);
    if (!trace.group_ids.empty()) to.group_ids.push_back(trace.group_ids[s]);
    part.batching.micro_step.push_back(batching.micro_step[s]);
    part.batching.rank.emplace_back(rank);
  }
  to.num_tokens = to.cu_seqlens.back();
  to.routes = routes->data();
  to.storage = routes;
  record_batching(part.batching, to);
  return part;
}

BatchedTrace take_layers(const BatchedTrace& batched, int first, int count) {
  BatchedTrace part = batched;
  const RoutingTrace& from = batched.trace;
  RoutingTrace& to = part.trace;
  const std::size_t layer_bytes = static_cast<std::size_t>(from.top_k) * size_of(from.type);
  const std::size_t bytes = layer_bytes * static_cast<std::size_t>(count);  // of a token
  expect_memory(static_cast<double>(bytes) * static_cast<double>(from.num_tokens), {.file = from.name});
  const auto routes = std::make_shared<std::vector<std::byte>>(bytes * static_cast<std::size_t>(from.num_tokens));
  const std::byte* token = from.routes + layer_bytes * static_cast<std::size_t>(first);
  for (auto at = routes->begin(); at != routes->end(); token += layer_bytes * static_cast<std::size_t>(from.num_layers))
    at = std::copy_n(token, bytes, at);
  to.num_layers = count;
  to.routes = routes->data();
  to.storage = routes;
  const auto cut = [&](auto& of_layer) {
    if (!of_layer.empty()) of_layer = {of_layer.begin() + first, of_layer.begin() + first + count};
  };
  cut(to.experts_of_layer);
  cut(to.top_k_of_layer);
  cut(to.layer_ids);
  return part;
}

BatchedTrace in_more_micro_steps(BatchedTrace batched, int factor) {
  auto& [trace, batching] = batched;
  batching.num_micro_steps *= factor;
  batching.num_ranks /= factor;
  batching.ranks_per_node = std::min(batching.ranks_per_node, batching.num_ranks);
  for (std::size_t s = 0; s < batching.rank.size(); ++s) {
    const int rank = batching.rank[s].value;
    batching.micro_step[s] = MicroStepId{batching.micro_step[s].value * factor + rank / batching.num_ranks};
    batching.rank[s] = RankId{rank % batching.num_ranks};
  }
  record_batching(batching, trace);
  return batched;
}

Array<double, 2> squared_lengths(const BatchedTrace& batched) {
  const auto& [trace, batching] = batched;
  expect_valid(batching, trace);
  Array<double, 2> sums(
      {static_cast<std::size_t>(batching.num_micro_steps), static_cast<std::size_t>(batching.num_ranks)});
  for (std::size_t s = 0; s < batching.rank.size(); ++s) {
    const auto length = static_cast<double>(trace.sequence_length(static_cast<int>(s)));
    sums(batching.micro_step[s], batching.rank[s]) += length * length;
  }
  return sums;
}

void record_batching(const Batching& batching, RoutingTrace& trace) {
  trace.ranks = batching.num_ranks;
  trace.ranks_per_node = batching.ranks_per_node;
  trace.micro_step.clear();
  trace.rank.clear();
  for (const MicroStepId m : batching.micro_step) trace.micro_step.push_back(m.value);
  for (const RankId r : batching.rank) trace.rank.push_back(r.value);
}

}  // namespace foremoe
