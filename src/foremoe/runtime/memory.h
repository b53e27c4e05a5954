#pragma once

// Memory of a rank's tensors.

#include <cstddef>
#include <memory>
#include <optional>

#include "foremoe/core/units.h"

namespace foremoe {

// Owned, 64-byte aligned, zeroed when it is allocated.
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

// Throws InputError naming the bytes when there is too little. What is given is really there, not promised.
Memory allocate_memory(Bytes bytes);

// What this process may still take: the least of the machine's available memory and of what the control group (version
// 2) still allows. None where the system does not say.
std::optional<Bytes> available_memory();

}  // namespace foremoe
