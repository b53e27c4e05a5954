#pragma once

// Facts that the processes of a run compare before execution (agreement.h).

#include "agreement.h"
#include "run_execution.h"

namespace foremoe::cli {

// Returns all arguments except the thread count and the input file names, which may differ between hosts. The overload
// below compares file contents.
Facts facts_of(const RunArguments& arguments);

// Returns digests of load, routes and homes, and of plans and the previous step if given.
Facts facts_of(const RunInput& input);

}  // namespace foremoe::cli
