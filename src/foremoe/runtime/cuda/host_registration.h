#pragma once

// Page-locked host memory, process-wide: ranks that are threads of one process pin the same arena, which CUDA takes
// once. The last to unpin it lets it go. Any thread may call.

#include <cstddef>
#include <span>

namespace foremoe::cuda {

void pin_host_memory(std::span<const std::byte> memory);
void unpin_host_memory(std::span<const std::byte> memory) noexcept;

}  // namespace foremoe::cuda
