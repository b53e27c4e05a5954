#pragma once

// Allocation of memory for tensors.

#include <cstddef>
#include <memory>

#include "foremoe/core/units.h"

namespace foremoe {

// Owned memory: 64-byte aligned, zeroed at allocation.
class Memory {
 public:
  Memory() = default;
  std::byte* data() const { return data_.get(); }
  float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  Bytes bytes() const { return bytes_; }

 private:
  friend Memory allocate_memory(Bytes bytes);
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  Bytes bytes_;
};

// Throws InputError with the number of bytes if memory is insufficient. Touches all pages, so the memory is committed.
Memory allocate_memory(Bytes bytes);

}  // namespace foremoe
