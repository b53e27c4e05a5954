#pragma once

// Who needs more memory than there is, in sentences.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/units.h"

namespace foremoe {

// "78.5": 10⁹ bytes.
std::string gigabytes(Bytes bytes);

struct NeededMemory {
  std::string who;  // a policy
  Bytes bytes;      // of its fullest rank
};

// A sentence where some need more than a rank of the cluster has, and one where some need more than the budget.
std::vector<std::string> memory_remarks(const std::vector<NeededMemory>& needed, const CostModel& cost,
                                        std::optional<Bytes> budget);

}  // namespace foremoe
