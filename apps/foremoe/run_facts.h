#pragma once

// What the processes of one run hold against each other before anything starts (agreement.h).

#include "agreement.h"
#include "run_execution.h"

namespace foremoe::cli {

// All arguments but for the number of threads and the names of files that are read: those
// may differ from host to host, and what is in them is compared by the other function.
Facts facts_of(const RunArguments& arguments);

// Digests of what was read: load, routes, homes, and of plans and former steps where they were given.
Facts facts_of(const RunInput& input);

}  // namespace foremoe::cli
