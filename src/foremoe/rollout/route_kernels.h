#pragma once

// Faster kernels to check and count routes on particular processors; count_routes.cpp selects one. Each kernel has its
// own file. Its function returns null for an unsupported processor or shape.

#include <cstddef>
#include <cstdint>

#include "foremoe/rollout/count_routes.h"

namespace foremoe {

// Copies rows, and returns whether every row of the copy has distinct entries below num_experts. Returns false for
// missing rows. Writes up to kCopySlack bytes more than it reads.
inline constexpr std::size_t kCopySlack = 32;
using CleanRows = bool (*)(const std::byte* rows, std::size_t bytes, int num_experts, std::byte* copy);
CleanRows clean_rows_avx2(const RouteShape& shape);  // top_k 2, 4, 8; rows of at most 16 bytes

// Validates tokens and adds them to the histogram [layer][expert]. The caller prevents overflow. Returns false if a row
// is malformed.
using CountRows = bool (*)(const RouteShape& shape, const std::byte* rows, std::size_t num_tokens,
                           std::uint16_t* histogram);
CountRows count_rows_avx512(const RouteShape& shape);  // U8, top_k 8, at most 128 experts, 8 layers or more

}  // namespace foremoe
