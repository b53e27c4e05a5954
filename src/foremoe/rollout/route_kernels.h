#pragma once

// Faster ways to check and to count routes on particular processors; count_routes.cpp chooses. Each has its own file,
// and returns null where it does not support the processor or the shape.

#include <cstddef>
#include <cstdint>

#include "foremoe/rollout/count_routes.h"

namespace foremoe {

// True when every row has distinct entries below num_experts; missing rows do not pass.
using CleanRows = bool (*)(const std::byte* rows, std::size_t bytes, int num_experts);
CleanRows clean_rows_avx2(const RouteShape& shape);  // top_k 2, 4, 8; rows of at most 16 bytes

// Validates and adds tokens to the histogram [layer][expert], which the caller keeps from overflowing. False when a
// row is malformed.
using CountRows = bool (*)(const RouteShape& shape, const std::byte* rows, std::size_t num_tokens,
                           std::uint16_t* histogram);
CountRows count_rows_avx512(const RouteShape& shape);  // U8, top_k 8, at most 128 experts, 8 layers or more

}  // namespace foremoe
