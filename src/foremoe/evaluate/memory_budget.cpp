#include "foremoe/evaluate/memory_budget.h"

#include <algorithm>
#include <limits>

namespace foremoe {

Tokens largest_micro_batch(const SimulatedStep& step, Bytes budget, Tokens mean_tokens_per_rank) {
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const SimulatedPhase* phase : {&step.recompute, &step.policy_update}) {
    const RankMemory& memory = phase->memory;
    const std::int64_t left = budget.value - (memory.sum() - memory.activations).value;
    if (left <= 0) return Tokens{0};
    if (memory.activations.value == 0) continue;
    const double times = static_cast<double>(left) / static_cast<double>(memory.activations.value);
    most = std::min(most, static_cast<std::int64_t>(times * static_cast<double>(mean_tokens_per_rank.value)));
  }
  return Tokens{most};
}

}  // namespace foremoe
