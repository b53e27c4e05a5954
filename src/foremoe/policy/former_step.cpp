#include "foremoe/policy/former_step.h"

#include <algorithm>
#include <cassert>
#include <functional>

#include "foremoe/core/error.h"

namespace foremoe {

const LoadTable* former_load(const PolicyInput& input) {
  const LoadTable* const former = input.previous_load;
  if (former != nullptr &&
      (former->num_layers() != input.load.num_layers() || former->num_experts() != input.load.num_experts())) {
    throw InputError({.file = former->name, .field = "load"},
                     "must be of as many layers and experts as the load that is planned");
  }
  return former;
}

const StepPlan* former_plan(const PolicyInput& input, std::string_view policy) {
  const StepPlan* const former = input.previous;
  const bool continues =
      former != nullptr && former->policy == policy && former->num_events() > 0 &&
      former->num_layers() == input.load.num_layers() && former->num_ranks() == input.load.num_ranks() &&
      former->num_experts() == input.load.num_experts() && former->guest_slots == input.options.guest_slots;
  return continues ? former : nullptr;
}

Array<ExpertId, 2> last_placement(const StepPlan& plan, LayerId layer) {
  Array<ExpertId, 2> last({plan.slot_expert.extent(2), plan.slot_expert.extent(3)});
  std::ranges::copy(plan.slot_expert.view()[plan.num_events() - 1][layer].flat(), last.flat().begin());
  return last;
}

std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load, std::size_t first,
                                               std::size_t count) {
  assert(first + count <= load.extent(0));
  std::vector<std::int64_t> sum(load.extent(1));
  for (std::size_t m = first; m < first + count; ++m) {
    std::ranges::transform(load.row(m), sum, sum.begin(), std::plus<>{});
  }
  return sum;
}

std::vector<std::int64_t> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load) {
  return sum_over_micro_steps(load, 0, load.extent(0));
}

}  // namespace foremoe
