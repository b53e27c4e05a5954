#pragma once

// Routes of the rows that one rank has in a micro-step, as trainers hold them: any integer type, [token][layer][top_k],
// −1 (or the largest value of an unsigned type that no expert has) in all entries of a row without a route.
//
// An executor keeps them as int32. They are converted and counted in one sweep, a block of tokens at a time, so that
// each block is counted while it is in the cache. The counting itself, and the validation, are RouteCounter's.

#include <cstdint>
#include <span>

namespace foremoe {

struct RowShape {
  std::int64_t num_tokens = 0;
  int num_layers = 1;
  int top_k = 1;
  int num_experts = 1;
};

// Adds to counts[layer * num_experts + expert], and writes int32 routes. Id: uint8, uint16, int16 or int64. Throws
// InputError, field `routes`, index [token, layer, entry], for the first row that is not a route: an entry out of
// range, an expert twice, or −1 beside experts.
template <class Id>
void count_rows(std::span<const Id> routes, const RowShape& shape, std::span<std::int32_t> int32_routes,
                std::span<std::int64_t> counts);

// The same for routes that are int32 already.
void count_rows(std::span<const std::int32_t> routes, const RowShape& shape, std::span<std::int64_t> counts);

// As Megatron-LM's router makes its map: an expert that a row names twice gets one row. Every row must have a route.
// Id: uint8, uint16, int16, int32 or int64.
template <class Id>
void count_distinct(std::span<const Id> routes, const RowShape& shape, std::span<std::int64_t> counts);

}  // namespace foremoe
