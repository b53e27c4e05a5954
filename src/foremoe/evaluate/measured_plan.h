#pragma once

// What placement costs: a policy's plan, and how long the step waits for it. docs/users/simulation.md has the rule.

#include <optional>
#include <string>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

struct MeasuredPlan {
  PlannedStep step;
  // CPU time from the beginning of planning until the first micro-step can begin ÷ threads, of all the model's layers.
  // 0 where the policy does not plan ahead.
  double placement_seconds = 0;
};

// Nothing where the policy is not defined for the input; `why_not` then says why.
std::optional<MeasuredPlan> plan_measured(const Policy& policy, const StepInput& input, const PlannerOptions& planner,
                                          const EvaluationContext& context, std::string& why_not);

}  // namespace foremoe
