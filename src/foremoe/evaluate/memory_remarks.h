#pragma once

// Sentences about policies that need more memory than is available.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/units.h"

namespace foremoe {

// Formats bytes in units of 10⁹ bytes: "78.5".
std::string gigabytes(Bytes bytes);

struct NeededMemory {
  std::string who;  // a policy
  Bytes bytes;      // of the rank with the most
};

// Returns up to two sentences, which name policies that need more memory than a rank has or than `budget`.
std::vector<std::string> memory_remarks(const std::vector<NeededMemory>& needed, const CostModel& cost,
                                        std::optional<Bytes> budget);

// Returns how the optimizer state of a rank's experts depends on --optimizer-shards; empty if it was given, or if the
// job's groups share the state.
std::string optimizer_remark(const CostModel& cost, int num_ranks);

}  // namespace foremoe
