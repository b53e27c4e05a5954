#include "foremoe/core/error.h"
#include "foremoe/runtime/process_group.h"

namespace foremoe {

bool mpi_is_built() { return false; }

std::unique_ptr<ProcessGroup> join_process_group() {
  throw InputError({.file = "--comm mpi", .field = "", .index = ""},
                   "this build has no MPI: install it and configure again");
}

}  // namespace foremoe
