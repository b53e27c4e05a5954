#pragma once

// Routes of the rows of one rank in a micro-step, as trainers store them: any integer type, [token][layer][top_k]. A
// row without a route has −1 in all entries (or the largest value of an unsigned type, if that is not an expert).
//
// Executors need int32. Routes are converted and counted in one sweep, one block of tokens at a time, so that each
// block is counted while it is in cache. RouteCounter counts and validates.

#include <cstdint>
#include <span>

namespace foremoe {

struct RowShape {
  std::int64_t num_tokens = 0;
  int num_layers = 1;
  int top_k = 1;
  int num_experts = 1;
};

// Adds the routes to counts[layer * num_experts + expert] and writes them as int32. Id: uint8, uint16, int16 or int64.
// Throws InputError, field `routes`, index [token, layer, entry], for the first invalid row: an entry out of range, a
// repeated expert, or −1 next to experts.
template <class Id>
void count_rows(std::span<const Id> routes, const RowShape& shape, std::span<std::int32_t> int32_routes,
                std::span<std::int64_t> counts);

// Like the function above, for routes that are already int32.
void count_rows(std::span<const std::int32_t> routes, const RowShape& shape, std::span<std::int64_t> counts);

// Counts as Megatron-LM's router does: an expert that a row lists twice counts once. Every row must have a route. Id:
// uint8, uint16, int16, int32 or int64.
template <class Id>
void count_distinct(std::span<const Id> routes, const RowShape& shape, std::span<std::int64_t> counts);

}  // namespace foremoe
