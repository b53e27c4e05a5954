#include "foremoe/core/error.h"
#include "foremoe/runtime/process_group.h"

namespace foremoe {

bool mpi_is_built() { return false; }

std::unique_ptr<ProcessGroup> join_process_group() {
  throw InputError({.file = "--comm mpi"}, "this program was built without MPI: install it and build again");
}

}  // namespace foremoe
