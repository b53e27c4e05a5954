#include "foremoe/rollout/row_routes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <limits>
#include <utility>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/rollout/count_routes.h"

namespace foremoe {
namespace {

constexpr std::size_t kBlockEntries = 16384;  // 64 KiB of int32: a block stays in the L2 cache

std::size_t entries_per_token(const RowShape& shape) {
  return static_cast<std::size_t>(shape.num_layers) * static_cast<std::size_t>(shape.top_k);
}

RouteShape int32_shape(const RowShape& shape) {
  return {.type = RouteType::kI32,
          .num_layers = shape.num_layers,
          .top_k = shape.top_k,
          .num_experts = shape.num_experts,
          .partial_rows = false};  // executors take a row's first entry for all of them
}

[[noreturn]] void refuse(std::int64_t token, int layer, int entry, const std::string& what) {
  throw InputError({.field = "routes", .index = fmt::format("[{}, {}, {}]", token, layer, entry)}, what);
}

// `value(i)`: original entry i of the block.
template <class Value>
[[noreturn]] void refuse_first_fault(std::span<const std::int32_t> block, std::int64_t first_token,
                                     const RowShape& shape, Value value) {
  const auto tokens = static_cast<std::int64_t>(block.size() / entries_per_token(shape));
  const auto* const bytes = reinterpret_cast<const std::byte*>(block.data());
  const auto fault = find_fault(int32_shape(shape), bytes, tokens);
  if (!fault) throw InputError({.field = "routes"}, kRoutesChanged);
  const std::size_t i = static_cast<std::size_t>(fault->token) * entries_per_token(shape) +
                        static_cast<std::size_t>(fault->layer) * static_cast<std::size_t>(shape.top_k) +
                        static_cast<std::size_t>(fault->entry);
  const bool in_range = block[i] >= -1 && block[i] < shape.num_experts;
  refuse(first_token + fault->token, fault->layer, fault->entry,
         in_range ? fault->what : fmt::format("expert {}, but there are {}", value(i), shape.num_experts));
}

bool count_block(RouteCounter& counter, std::span<const std::int32_t> block, const RowShape& shape,
                 std::span<std::int64_t> counts) {
  const auto tokens = static_cast<std::int64_t>(block.size() / entries_per_token(shape));
  return counter.count(reinterpret_cast<const std::byte*>(block.data()), tokens, counts.data(),
                       static_cast<std::size_t>(shape.num_experts));
}

// The largest value of an unsigned type is an expert if num_experts includes it. Ids that do not fit become the
// smallest int32, which is also out of range.
template <class Id>
std::int32_t as_int32(Id id, int num_experts) {
  if constexpr (std::is_unsigned_v<Id>) {
    return id == std::numeric_limits<Id>::max() && id >= num_experts ? -1 : static_cast<std::int32_t>(id);
  } else {
    return std::in_range<std::int32_t>(id) ? static_cast<std::int32_t>(id) : std::numeric_limits<std::int32_t>::min();
  }
}

template <class Id>
void to_int32(std::span<const Id> routes, int num_experts, std::span<std::int32_t> int32_routes) {
  if constexpr (std::is_same_v<Id, std::int64_t>) {
    // Branch-free, so that the loop vectorises: the upper halves of biased ids are 0 if all fit.
    std::uint64_t upper = 0;
    for (std::size_t i = 0; i < routes.size(); ++i) {
      upper |= (static_cast<std::uint64_t>(routes[i]) + 0x8000'0000U) >> 32U;
      int32_routes[i] = static_cast<std::int32_t>(routes[i]);
    }
    if (upper == 0) return;
  }
  std::ranges::transform(routes, int32_routes.begin(), [&](Id id) { return as_int32(id, num_experts); });
}

}  // namespace

template <class Id>
void count_rows(std::span<const Id> routes, const RowShape& shape, std::span<std::int32_t> int32_routes,
                std::span<std::int64_t> counts) {
  assert(routes.size() == int32_routes.size());
  RouteCounter counter(int32_shape(shape));
  const std::size_t per_token = entries_per_token(shape);
  const std::size_t step = std::max<std::size_t>(1, kBlockEntries / per_token) * per_token;
  for (std::size_t first = 0; first < routes.size(); first += step) {
    const std::size_t size = std::min(step, routes.size() - first);
    const std::span block = int32_routes.subspan(first, size);
    to_int32(routes.subspan(first, size), shape.num_experts, block);
    if (count_block(counter, block, shape, counts)) continue;
    refuse_first_fault(block, static_cast<std::int64_t>(first / per_token), shape,
                       [&](std::size_t i) { return routes[first + i]; });
  }
}

template void count_rows(std::span<const std::uint8_t>, const RowShape&, std::span<std::int32_t>,
                         std::span<std::int64_t>);
template void count_rows(std::span<const std::uint16_t>, const RowShape&, std::span<std::int32_t>,
                         std::span<std::int64_t>);
template void count_rows(std::span<const std::int16_t>, const RowShape&, std::span<std::int32_t>,
                         std::span<std::int64_t>);
template void count_rows(std::span<const std::int64_t>, const RowShape&, std::span<std::int32_t>,
                         std::span<std::int64_t>);

void count_rows(std::span<const std::int32_t> routes, const RowShape& shape, std::span<std::int64_t> counts) {
  RouteCounter counter(int32_shape(shape));
  if (count_block(counter, routes, shape, counts)) return;
  refuse_first_fault(routes, 0, shape, [&](std::size_t i) { return routes[i]; });
}

template <class Id>
void count_distinct(std::span<const Id> routes, const RowShape& shape, std::span<std::int64_t> counts) {
  std::vector<std::size_t> last_row(static_cast<std::size_t>(shape.num_experts));  // last row with this expert, from 1
  const auto top_k = static_cast<std::size_t>(shape.top_k);
  const auto layers = static_cast<std::size_t>(shape.num_layers);
  std::size_t row = 0;
  for (auto entry = routes.begin(); entry != routes.end(); ++row) {
    std::int64_t* const of_layer = counts.data() + row % layers * last_row.size();
    for (std::size_t k = 0; k < top_k; ++k, ++entry) {
      const std::int64_t expert = static_cast<const volatile Id&>(*entry);  // read once: others may change it
      if (expert < 0 || expert >= shape.num_experts) {
        refuse(static_cast<std::int64_t>(row / layers), static_cast<int>(row % layers), static_cast<int>(k),
               fmt::format("expert {}, but there are {}", expert, shape.num_experts));
      }
      std::size_t& last = last_row[static_cast<std::size_t>(expert)];
      of_layer[expert] += last == row + 1 ? 0 : 1;
      last = row + 1;
    }
  }
}

template void count_distinct(std::span<const std::uint8_t>, const RowShape&, std::span<std::int64_t>);
template void count_distinct(std::span<const std::uint16_t>, const RowShape&, std::span<std::int64_t>);
template void count_distinct(std::span<const std::int16_t>, const RowShape&, std::span<std::int64_t>);
template void count_distinct(std::span<const std::int32_t>, const RowShape&, std::span<std::int64_t>);
template void count_distinct(std::span<const std::int64_t>, const RowShape&, std::span<std::int64_t>);

}  // namespace foremoe
