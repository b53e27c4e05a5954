#pragma once

// Named POSIX shared memory that does not outlive its users. The name carries the creator's process id, its start time
// and the namespace in which the id is one: whoever creates a segment first removes those of this user and namespace
// whose creator is dead, so that a killed run leaves nothing behind that the next start does not clean up, and a
// container that shares the memory of another cannot take it for dead. What a container left that is gone stays until
// the memory that it shared goes.

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
  // Nobody can open it any more; who has it keeps it. With that nothing is left behind by a process that is killed. No
  // effect but by the creator's object.
  void remove_name();

 private:
  std::string name_;
  std::span<std::byte> bytes_;
  int owner_pid_ = 0;  // of the creator's object alone
};

// Removes what dead processes left. create() does it too; commands may call it when they start.
void remove_stale_shared_memory();

// Removes every name that this process has created and not yet removed; create() throws from then on. For the handler
// of a signal that ends the process. Async-signal-safe.
void remove_own_shared_memory() noexcept;

}  // namespace foremoe
