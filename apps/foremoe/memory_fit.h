#pragma once

// Does what a step holds fit on a rank? What is modelled is told whether it fits or not, so somebody has to say.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/units.h"

namespace foremoe::cli {

struct NeededMemory {
  std::string who;  // a policy
  Bytes bytes;      // of its fullest rank
};

// A sentence where some need more than a rank of the cluster has, and one where some need more than the budget.
std::vector<std::string> memory_remarks(const std::vector<NeededMemory>& needed, const CostModel& cost,
                                        std::optional<Bytes> budget);

// "78.5": 10⁹ bytes.
std::string gigabytes(Bytes bytes);

}  // namespace foremoe::cli
