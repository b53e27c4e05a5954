#pragma once

// Named POSIX shared memory that does not outlive its users. A name contains the creator's process id, start time and
// process-id namespace. Before creating a segment, a process removes all segments of its user and namespace whose
// creator is dead. The next start thus cleans up after a killed run, and containers that share memory do not remove
// each other's segments. Segments of a container that no longer exists remain until the shared memory itself is freed.

#include <cstddef>
#include <span>
#include <string>

#include "foremoe/core/units.h"

namespace foremoe {

class SharedMemory {
 public:
  SharedMemory() = default;
  // `purpose` becomes part of the name. The memory is zeroed and 64-byte aligned. create() reserves the bytes, not the
  // first touch. Throws InputError, with purpose and size, if there is too little memory.
  static SharedMemory create(const std::string& purpose, Bytes bytes);
  static SharedMemory open(const std::string& name);  // throws InputError if it does not exist
  ~SharedMemory();                                    // unmaps; the creator also removes the name
  SharedMemory(SharedMemory&&) noexcept;
  SharedMemory& operator=(SharedMemory&&) noexcept;  // swaps

  const std::string& name() const { return name_; }
  std::span<std::byte> bytes() const { return bytes_; }
  // Removes the name. No process can open the segment any more, but existing mappings stay valid, and a process that is
  // killed later leaves no segment behind. No effect on objects from open().
  void remove_name();

 private:
  std::string name_;
  std::span<std::byte> bytes_;
  int owner_pid_ = 0;  // 0 unless this object created the segment
};

// Removes segments of dead processes. create() also does so; commands may call it when they start.
void remove_stale_shared_memory();

// Removes every name that this process created and has not yet removed. Later create() calls throw. For signal handlers
// that end the process. Async-signal-safe.
void remove_own_shared_memory() noexcept;

}  // namespace foremoe
