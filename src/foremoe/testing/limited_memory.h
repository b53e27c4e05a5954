#pragma once

// Lets a test forbid its process to allocate more memory.

#include "foremoe/core/memory_limit.h"
#include "foremoe/testing/address_space.h"

namespace foremoe::test {

// Until the end of its life, the process may allocate 256 MB, and 8 MiB for each processor.
class LimitedMemory {
 public:
  LimitedMemory() { limit_memory(Bytes{256'000'000}); }
  ~LimitedMemory() { limit_memory(std::nullopt); }
  LimitedMemory(const LimitedMemory&) = delete;
  LimitedMemory& operator=(const LimitedMemory&) = delete;
};

}  // namespace foremoe::test
