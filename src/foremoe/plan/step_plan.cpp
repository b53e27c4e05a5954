#include "foremoe/plan/step_plan.h"

#include <algorithm>
#include <array>

namespace foremoe {

static constexpr std::array<std::string_view, 4> kResidencyNames = {"static", "resident", "shared", "free"};

std::string_view to_string(Residency residency) { return kResidencyNames[static_cast<std::size_t>(residency)]; }

std::optional<Residency> residency_from_string(std::string_view text) {
  const auto* at = std::find(kResidencyNames.begin(), kResidencyNames.end(), text);
  if (at == kResidencyNames.end()) return std::nullopt;
  return static_cast<Residency>(at - kResidencyNames.begin());
}

int StepPlan::num_micro_steps() const {
  const auto last = std::max_element(event_micro_step.begin(), event_micro_step.end());
  return last == event_micro_step.end() ? 0 : last->value + 1;
}

}  // namespace foremoe
