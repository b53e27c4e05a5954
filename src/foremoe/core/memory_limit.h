#pragma once

// Refuses input that needs more memory than this process can have, before the memory is allocated.
//
// A file of a few bytes can claim a table of terabytes. Linux grants such memory and ends the process when it writes
// there. `Array` therefore calls expect_memory() for its shape. Readers and importers call it first, with the place in
// the file, and for vectors whose size input determines. A limit of our own is the system's RLIMIT_DATA, which holds
// for all other allocations, too (std::bad_alloc), and for programs that this process starts.

#include <optional>

#include "foremoe/core/error.h"
#include "foremoe/core/units.h"

namespace foremoe {

// What this process can still allocate: the least of what the machine has available without swapping, and what its
// control groups (version 1 or 2), RLIMIT_DATA and RLIMIT_AS leave. INT64_MAX if the system reports none of these.
Bytes available_memory();

// Limits what this process allocates from now on, by RLIMIT_DATA, besides the stacks of one thread per processor.
// std::nullopt restores the limit that the process had before the first call, which no call exceeds.
void limit_memory(std::optional<Bytes> most);

class InsufficientMemory : public InputError {
  using InputError::InputError;
};

// Throws InsufficientMemory with both amounts if more than available_memory() is needed. Requests below 16 MiB are not
// checked, since the check reads files of the system. `bytes` is a floating-point number, so products do not overflow.
void expect_memory(double bytes, const Where& where = {});

}  // namespace foremoe
