#include "foremoe/plan/planned_loads.h"

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

}  // namespace foremoe
