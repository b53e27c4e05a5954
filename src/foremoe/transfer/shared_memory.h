#pragma once

// Named POSIX shared memory that does not outlive its users. The name carries the creator's process id and start
// time: whoever creates a segment first removes those of this user whose creator is dead, so that a killed run leaves
// nothing behind that the next start does not clean up.

#include <cstddef>
#include <span>
#include <string>

#include "foremoe/core/units.h"

namespace foremoe {

class SharedMemory {
 public:
  SharedMemory() = default;
  // `purpose` becomes part of the name. Zeroed, 64-byte aligned. Throws InputError naming what and how much when there
  // is too little memory: the bytes are reserved here, not at first touch.
  static SharedMemory create(const std::string& purpose, Bytes bytes);
  static SharedMemory open(const std::string& name);  // throws InputError when there is none
  ~SharedMemory();                                    // unmaps; the creator also removes the name
  SharedMemory(SharedMemory&&) noexcept;
  SharedMemory& operator=(SharedMemory&&) noexcept;  // exchanges

  const std::string& name() const { return name_; }
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::string name_;
  std::span<std::byte> bytes_;
  int owner_pid_ = 0;  // of the creator's object alone
};

// Removes what dead processes left; how many segments.
int remove_stale_shared_memory();

}  // namespace foremoe
