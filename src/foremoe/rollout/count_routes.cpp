#include "foremoe/rollout/count_routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <limits>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/rollout/route_entry.h"
#include "foremoe/rollout/route_kernels.h"

namespace foremoe {

namespace {

constexpr std::size_t kTokensPerFlush = std::numeric_limits<std::uint16_t>::max();  // 16-bit counters do not overflow
constexpr std::size_t kBytesPerBlock = 512;  // copied and validated per call: amortises the call and stays in cache

// Adds one valid row. Loads entries eight bytes at a time and extracts them by shifts: 25 % faster than one load per
// entry.
template <class Id>
void scatter(const std::byte* row, std::size_t top_k, std::uint16_t* counts) {
  using Unsigned = std::make_unsigned_t<Id>;
  constexpr std::size_t kTogether = sizeof(std::uint64_t) / sizeof(Id);
  constexpr unsigned kBits = 8 * sizeof(Id);
  std::size_t k = 0;
  for (; k + kTogether <= top_k; k += kTogether) {
    std::uint64_t word = 0;
    std::memcpy(&word, row + k * sizeof(Id), sizeof word);
    for (unsigned j = 0; j < kTogether; ++j) ++counts[static_cast<Unsigned>(word >> (j * kBits))];
  }
  for (; k < top_k; ++k) ++counts[load_entry<Unsigned>(row, k)];
}

template <class Id>
bool is_missing(const std::byte* row, std::size_t top_k) {
  std::size_t k = 0;
  while (k < top_k && load_entry<Id>(row, k) == kSentinel<Id>) ++k;
  return k == top_k;
}

std::size_t of_layer(std::span<const int> values, int layer, int otherwise) {
  return static_cast<std::size_t>(values.empty() ? otherwise : values[static_cast<std::size_t>(layer)]);
}

}  // namespace

RouteCounter::RouteCounter(const RouteShape& shape, RouteKernel kernel)
    : shape_(shape),
      histogram_(static_cast<std::size_t>(shape.num_layers) * static_cast<std::size_t>(shape.num_experts)),
      seen_(static_cast<std::size_t>(shape.num_experts + shape.weightless_experts)) {
  assert(sentinel_of(shape.type) < 0 || std::ssize(seen_) <= sentinel_of(shape.type));
  if (!shape.has_layers_alike()) return;
  if (kernel == RouteKernel::kAny) count_rows_ = count_rows_avx512(shape);
  if (kernel != RouteKernel::kPortable) clean_rows_ = clean_rows_avx2(shape);
}

bool RouteCounter::count(const std::byte* routes, std::int64_t num_tokens, std::int64_t* counts,
                         std::size_t layer_stride) {
  auto left = static_cast<std::size_t>(num_tokens);
  while (left > 0) {
    const std::size_t tokens = std::min(left, kTokensPerFlush);
    const bool valid = count_some(routes, tokens);
    flush(counts, layer_stride);  // also clears the histogram if a row was malformed
    if (!valid) return false;
    routes += tokens * shape_.token_bytes();
    left -= tokens;
  }
  return true;
}

bool RouteCounter::count_some(const std::byte* rows, std::size_t num_tokens) {
  if (count_rows_ != nullptr) {
    if (count_rows_(shape_, rows, num_tokens, histogram_.data())) return true;
    std::ranges::fill(histogram_, std::uint16_t{0});
    count_rows_ = nullptr;  // a row has fewer experts, or is malformed
  }
  return visit_route_type(shape_.type, [&]<class Id>(std::type_identity<Id>) {
    return clean_rows_ != nullptr ? count_blocks<Id>(rows, num_tokens) : count_row_by_row<Id>(rows, num_tokens);
  });
}

template <class Id>
bool RouteCounter::count_blocks(const std::byte* rows, std::size_t num_tokens) {
  const std::size_t token_bytes = shape_.token_bytes();
  const std::size_t row_bytes = shape_.row_bytes();
  const auto top_k = static_cast<std::size_t>(shape_.top_k);
  const auto experts = static_cast<std::size_t>(shape_.num_experts);
  const std::size_t tokens_per_block = std::max<std::size_t>(1, kBytesPerBlock / token_bytes);
  block_.resize(tokens_per_block * token_bytes + kCopySlack);
  for (std::size_t t = 0; t < num_tokens; t += tokens_per_block) {
    const std::size_t tokens = std::min(tokens_per_block, num_tokens - t);
    const std::byte* row = block_.data();
    if (!clean_rows_(rows + t * token_bytes, tokens * token_bytes, shape_.num_experts, block_.data())) {
      if (!count_row_by_row<Id>(row, tokens)) return false;
      continue;
    }
    const auto scatter_all = [&](auto k) {
      for (std::size_t i = 0; i < tokens; ++i) {
        std::uint16_t* counts = histogram_.data();
        for (int l = 0; l < shape_.num_layers; ++l, row += row_bytes, counts += experts) {
          scatter<Id>(row, k, counts);
        }
      }
    };
    if (top_k == 8) {
      scatter_all(std::integral_constant<std::size_t, 8>{});  // unrolled
    } else {
      scatter_all(top_k);
    }
  }
  return true;
}

template <class Id>
bool RouteCounter::count_row_by_row(const std::byte* rows, std::size_t num_tokens) {
  using Unsigned = std::make_unsigned_t<Id>;
  const std::size_t row_bytes = shape_.row_bytes();
  const auto top_k = static_cast<std::size_t>(shape_.top_k);
  const auto experts = static_cast<std::size_t>(shape_.num_experts);
  for (std::size_t t = 0; t < num_tokens; ++t) {
    std::uint16_t* counts = histogram_.data();
    for (int l = 0; l < shape_.num_layers; ++l, rows += row_bytes, counts += experts) {
      const std::uint64_t row = ++row_;
      const std::size_t present = of_layer(shape_.experts_of_layer, l, shape_.num_experts);
      std::size_t absent = 0;
      for (std::size_t k = 0; k < top_k; ++k) {
        const std::size_t e = load_once<Unsigned>(rows, k);  // negative ids become too large
        if (e >= present) [[unlikely]] {
          if (e == kSentinel<Unsigned>) {
            ++absent;
            continue;
          }
          ++uncounted_;
          if (e < experts || e >= seen_.size() || std::exchange(seen_[e], row) == row) return false;
          continue;
        }
        if (seen_[e] == row) return false;
        seen_[e] = row;
        ++counts[e];
      }
      if (absent == top_k) continue;  // missing
      uncounted_ += static_cast<std::int64_t>(absent);
      if (absent > 0 && !shape_.partial_rows) return false;
      if (!shape_.top_k_of_layer.empty() && top_k - absent > of_layer(shape_.top_k_of_layer, l, 0)) return false;
    }
  }
  return true;
}

void RouteCounter::flush(std::int64_t* counts, std::size_t layer_stride) {
  const auto experts = static_cast<std::size_t>(shape_.num_experts);
  for (std::size_t l = 0; l < static_cast<std::size_t>(shape_.num_layers); ++l) {
    for (std::size_t e = 0; e < experts; ++e) counts[l * layer_stride + e] += histogram_[l * experts + e];
  }
  std::ranges::fill(histogram_, std::uint16_t{0});
}

std::optional<RouteFault> find_fault(const RouteShape& shape, const std::byte* routes, std::int64_t num_tokens) {
  const auto top_k = static_cast<std::size_t>(shape.top_k);
  return visit_route_type(shape.type, [&]<class Id>(std::type_identity<Id>) -> std::optional<RouteFault> {
    const std::byte* row = routes;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (int l = 0; l < shape.num_layers; ++l, row += shape.row_bytes()) {
        if (is_missing<Id>(row, top_k)) continue;
        const auto experts = static_cast<std::int64_t>(of_layer(shape.experts_of_layer, l, shape.num_experts));
        const std::size_t most = of_layer(shape.top_k_of_layer, l, shape.top_k);
        std::size_t ids = 0;
        for (std::size_t k = 0; k < top_k; ++k) {
          const auto id = static_cast<std::int64_t>(load_entry<Id>(row, k));
          RouteFault fault{.token = t, .layer = l, .entry = static_cast<int>(k), .what = {}};
          if (id == kSentinel<Id> && shape.partial_rows) continue;
          const bool weightless = id >= shape.num_experts && id < shape.num_experts + shape.weightless_experts;
          if (id < 0 || (id >= experts && !weightless)) {
            fault.what = id == kSentinel<Id> ? fmt::format("sentinel {} in a row that is not missing", id)
                                             : fmt::format("expert {}, but there are {}", id, experts);
            return fault;
          }
          if (++ids > most) {
            fault.what = fmt::format("a token of this layer chooses only {} experts", most);
            return fault;
          }
          for (std::size_t j = 0; j < k; ++j) {
            if (load_entry<Id>(row, j) == id) {
              fault.what = fmt::format("expert {} appears twice in a row", id);
              return fault;
            }
          }
        }
      }
    }
    return std::nullopt;
  });
}

void check_routes(const RoutingTrace& trace) {
  if (const auto fault = find_fault(shape_of(trace), trace.routes, trace.num_tokens)) {
    throw InputError({.file = trace.name,
                      .field = "routed_experts",
                      .index = fmt::format("[{}, {}, {}]", fault->token, fault->layer, fault->entry)},
                     fault->what);
  }
}

void refuse_routes(const RoutingTrace& trace) {
  check_routes(trace);
  throw InputError({.file = trace.name, .field = "routed_experts"}, kRoutesChanged);
}

}  // namespace foremoe
