#pragma once

// Estimates a run's memory before it starts, so that an excessive run fails with an error instead of being killed.

#include "foremoe/runtime/moe_model.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// Maximum rows that each rank computes in any layer of any micro-step if homes serve all rows: [rank].
std::vector<std::int64_t> most_rows_at_homes(const LoadTable& load, ArrayView<const RankId, 2> home);

struct MemoryNeed {
  const LoadTable& load;
  const ReplayRoutes& routes;
  ArrayView<const RankId, 2> home;  // [layer][expert]
  ModelSize model;
  int guest_slots = 0;
  int in_flight = 1;
  int ranks_here = 1;  // ranks that share this memory
  bool backward = true;
  bool adam = false;
  bool arena = true;      // copies may use the host path
  bool reference = true;  // results are gathered and compared with a reference here
};

// Upper estimate of the large buffers of all ranks that share this memory. Omits small buffers.
Bytes estimate_memory(const MemoryNeed& need);

// Throws InputError with the estimated and the available memory if the estimate is larger than the available memory.
void expect_enough_memory(const MemoryNeed& need);

}  // namespace foremoe
