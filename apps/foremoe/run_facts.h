#pragma once

// Facts that the processes of a run compare before execution (agreement.h).

#include "agreement.h"
#include "run_execution.h"

namespace foremoe::cli {

// All arguments except the number of threads and the names of input files, which may differ between hosts. The overload
// below compares the contents of the files.
Facts facts_of(const RunArguments& arguments);

// Digests of load, routes and homes, and of plans and the previous step if given.
Facts facts_of(const RunInput& input);

}  // namespace foremoe::cli
