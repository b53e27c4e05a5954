#include "foremoe/plan/planned_loads.h"

#include <algorithm>
#include <numeric>

namespace foremoe {

Array<Tokens, 3> planned_loads(const StepPlan& plan) {
  Array<Tokens, 3> loads({static_cast<std::size_t>(plan.num_micro_steps()), static_cast<std::size_t>(plan.num_layers()),
                          static_cast<std::size_t>(plan.num_ranks())});
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        const auto quotas = plan.slot_tokens.row(t, l, r);
        loads(plan.event_micro_step[static_cast<std::size_t>(t)], l, r) =
            std::accumulate(quotas.begin(), quotas.end(), Tokens{});
      }
    }
  }
  return loads;
}

std::optional<double> imbalance(std::span<const Tokens> rank_loads) {
  const Tokens total = std::accumulate(rank_loads.begin(), rank_loads.end(), Tokens{});
  if (total == Tokens{0}) return std::nullopt;
  return static_cast<double>(std::ranges::max(rank_loads).value) * static_cast<double>(rank_loads.size()) /
         static_cast<double>(total.value);
}

}  // namespace foremoe
