#include "foremoe/rollout/routing_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>

#include "foremoe/core/error.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/route_entry.h"

namespace foremoe {
namespace {

[[noreturn]] void fail(const RoutingTrace& trace, const char* field, const std::string& index,
                       const std::string& what) {
  throw InputError({.file = trace.name, .field = field, .index = index}, what);
}

void expect_sequences(const RoutingTrace& trace) {
  const std::vector<std::int64_t>& starts = trace.cu_seqlens;
  if (starts.size() < 2 || starts.size() > std::numeric_limits<int>::max()) {
    fail(trace, "cu_seqlens", "", fmt::format("{} entries, expected one more than there are sequences", starts.size()));
  }
  if (starts.front() != 0) fail(trace, "cu_seqlens", "[0]", fmt::format("{}, expected 0", starts.front()));
  for (std::size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] < starts[i - 1]) {
      fail(trace, "cu_seqlens", fmt::format("[{}]", i),
           fmt::format("{} is less than {} before it", starts[i], starts[i - 1]));
    }
  }
  if (starts.back() != trace.num_tokens) {
    fail(trace, "cu_seqlens", fmt::format("[{}]", starts.size() - 1),
         fmt::format("{}, expected the {} tokens of routed_experts", starts.back(), trace.num_tokens));
  }
}

// Requires entry s to be in [0, limit(s)).
template <class Limit>
void expect_per_sequence(const RoutingTrace& trace, const char* field, const std::vector<std::int32_t>& values,
                         Limit&& limit) {
  if (values.empty()) return;
  if (values.size() != static_cast<std::size_t>(trace.num_sequences())) {
    fail(trace, field, "", fmt::format("{} entries, expected {}", values.size(), trace.num_sequences()));
  }
  for (std::size_t s = 0; s < values.size(); ++s) {
    const std::int64_t end = limit(static_cast<int>(s));
    if (values[s] < 0 || values[s] >= end) {
      fail(trace, field, fmt::format("[{}]", s), fmt::format("{}, expected 0 to {}", values[s], end - 1));
    }
  }
}

// Converts a row with entries that are no experts of the layer.
void convert(const RoutingTrace& trace, std::int64_t token, LayerId layer, ExpertId sentinel, std::span<ExpertId> row) {
  const bool missing = std::ranges::count(row, sentinel) == std::ssize(row);
  for (std::size_t k = 0; k < row.size(); ++k) {
    const int id = row[k].value;
    const bool needs_expert =
        row[k] != sentinel && (id < trace.num_experts || id >= trace.num_experts + trace.weightless_experts);
    if (needs_expert && (id < 0 || id >= trace.experts_in(layer))) {
      fail(trace, "routed_experts", fmt::format("[{}, {}, {}]", token, layer.value, k),
           fmt::format("expert {}, but there are {}", id, trace.experts_in(layer)));
    }
    row[k] = missing ? kNoExpert : needs_expert ? ExpertId{id} : kUnassigned;
  }
}

}  // namespace

std::size_t size_of(RouteType type) {
  return visit_route_type(type, []<class Id>(std::type_identity<Id>) { return sizeof(Id); });
}

std::int64_t sentinel_of(RouteType type) {
  return visit_route_type(type, []<class Id>(std::type_identity<Id>) { return std::int64_t{kSentinel<Id>}; });
}

RouteType narrowest_route_type(int num_experts) {
  if (num_experts <= kSentinel<std::uint8_t>) return RouteType::kU8;
  if (num_experts <= kSentinel<std::uint16_t>) return RouteType::kU16;
  return RouteType::kI32;
}

std::int64_t num_ids(RouteType type) {
  switch (type) {
    case RouteType::kU8:
    case RouteType::kU16:
      return sentinel_of(type);
    case RouteType::kI16:
      return std::int64_t{1} << 15;
    case RouteType::kI32:
      break;
  }
  return std::int64_t{1} << 31;
}

void expect_valid(const RoutingTrace& trace) {
  constexpr auto kMaxInt = std::numeric_limits<int>::max();
  if (trace.num_layers < 1 || trace.num_layers > kMaxInt || trace.top_k < 1 || trace.top_k > kMaxExperts) {
    fail(trace, "routed_experts", "",
         fmt::format("shape [{}, {}, {}], expected [tokens, layers, top_k]", trace.num_tokens, trace.num_layers,
                     trace.top_k));
  }
  const std::int64_t most = std::min(kMaxExperts, num_ids(trace.type));
  const char* const why = most < kMaxExperts ? ": larger ids of this type mark rows without a route" : "";
  if (trace.num_experts < trace.top_k || trace.num_experts > most) {
    fail(trace, "num_experts", "", fmt::format("{}, expected {} to {}{}", trace.num_experts, trace.top_k, most, why));
  }
  if (trace.weightless_experts < 0 || trace.weightless_experts > most - trace.num_experts) {
    fail(trace, "weightless_experts", "",
         fmt::format("{}, expected 0 to {}{}", trace.weightless_experts, most - trace.num_experts, why));
  }
  expect_layers({.layers = static_cast<std::size_t>(trace.num_layers),
                 .experts = trace.num_experts,
                 .top_k = trace.top_k,
                 .experts_of_layer = trace.experts_of_layer,
                 .top_k_of_layer = trace.top_k_of_layer},
                trace.name);
  expect_sequences(trace);
  expect_per_sequence(trace, "prompt_lengths", trace.prompt_lengths,
                      [&](int s) { return trace.sequence_length(s) + 1; });
  expect_per_sequence(trace, "group_ids", trace.group_ids, [](int) { return std::int64_t{1} << 31; });
  if (trace.micro_step.empty() != trace.rank.empty()) {
    fail(trace, trace.rank.empty() ? "rank" : "micro_step", "", "is missing: micro_step and rank go together");
  }
  // Each micro-step has at least one sequence, so micro-steps do not outnumber sequences.
  expect_per_sequence(trace, "micro_step", trace.micro_step, [&](int) { return trace.num_sequences(); });
  expect_per_sequence(trace, "rank", trace.rank, [&](int) { return trace.ranks > 0 ? trace.ranks : kMaxRanks; });
}

void infer_ranks(RoutingTrace& trace) {
  if (!trace.has_batching()) return;
  if (trace.ranks == 0) trace.ranks = 1 + std::ranges::max(trace.rank);
  if (trace.ranks_per_node == 0) trace.ranks_per_node = kDefaultRanksPerNode;
  trace.ranks_per_node = std::min(trace.ranks_per_node, trace.ranks);
}

namespace {

// Copies the entries of the rows of one layer. kTopK: a common value of top_k, for the compiler; 0 for others. Returns
// whether all copies are experts. Others may change the entries, so the copies are checked.
template <class Id, std::size_t kTopK>
bool copy_rows(const std::byte* entries, std::size_t stride, std::size_t top_k, int experts, std::span<ExpertId> out) {
  const std::size_t k = kTopK != 0 ? kTopK : top_k;
  for (ExpertId* row = out.data(); row != out.data() + out.size(); row += k, entries += stride) {
    for (std::size_t i = 0; i < k; ++i) row[i] = ExpertId{std::int64_t{load_entry<Id>(entries, i)}};
  }
  return std::ranges::all_of(out, [&](ExpertId e) { return e >= ExpertId{0} && e < ExpertId{experts}; });
}

}  // namespace

void RoutingTrace::rows_of(std::int64_t first, LayerId layer, std::span<ExpertId> out) const {
  const auto k = static_cast<std::size_t>(top_k);
  assert(out.size() % k == 0 && layer.index() < static_cast<std::size_t>(num_layers));
  assert(first >= 0 && first + std::ssize(out) / top_k <= num_tokens);
  visit_route_type(type, [&]<class Id>(std::type_identity<Id>) {
    const std::size_t stride = static_cast<std::size_t>(num_layers) * k * sizeof(Id);
    const std::byte* entries = routes + static_cast<std::size_t>(first) * stride + layer.index() * k * sizeof(Id);
    const auto copy = k == 8 ? copy_rows<Id, 8> : copy_rows<Id, 0>;
    if (copy(entries, stride, k, experts_in(layer), out)) return;
    constexpr ExpertId kMissing{std::int64_t{kSentinel<Id>}};
    for (std::size_t at = 0; at < out.size(); at += k) {
      convert(*this, first + static_cast<std::int64_t>(at / k), layer, kMissing, out.subspan(at, k));
    }
  });
}

}  // namespace foremoe
