#pragma once

// Is there room for a run? Estimated before anything starts, so that it is refused with numbers and not killed.

#include "foremoe/runtime/moe_model.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// [rank], the most rows that it computes in any layer of any micro-step when homes serve all.
std::vector<std::int64_t> most_rows_at_homes(const LoadTable& load, ArrayView<const RankId, 2> home);

struct MemoryNeed {
  const LoadTable& load;
  const ReplayRoutes& routes;
  ArrayView<const RankId, 2> home;  // [layer][expert]
  ModelSize model;
  int guest_slots = 0;
  int in_flight = 1;
  int ranks_here = 1;  // that share this memory
  bool backward = true;
  bool adam = false;
  bool arena = true;      // copies may come from the host
  bool reference = true;  // results are gathered and held against it here
};

// What the largest buffers can come to, all ranks here together; small ones are left out.
Bytes estimate_memory(const MemoryNeed& need);

// Throws InputError that tells both.
void expect_enough_memory(const MemoryNeed& need);

}  // namespace foremoe
