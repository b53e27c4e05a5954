#pragma once

// What Python holds of an evaluation, and how one is made from keywords.

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "bindings.h"
#include "foremoe/evaluate/cost_request.h"

namespace foremoe::python {

// One policy's evaluation, with what it rests on.
struct Evaluated {
  std::shared_ptr<const Policy> policy;
  std::shared_ptr<const Workload> input;
  EvaluateOptions options;
  std::optional<Phase> phase;  // that alone is simulated; none: a step
  std::optional<CostModel> cost;
  std::shared_ptr<const Evaluation> evaluation;
  nlohmann::ordered_json figures;  // without comparisons with other policies

  Plan plan_of(Phase phase) const;  // throws PolicySkipped
};

// The keywords that evaluate() and evaluate_plan() have for what they rest on. Throws InputError for one that cannot
// be.
void set_options(const nb::dict& keywords, EvaluateOptions& evaluate, CostRequest& cost);

// Fills in the options that keywords set, cost, evaluation and figures: `evaluate` makes the evaluation of what the
// caller has filled in.
void fill(Evaluated& e, const nb::dict& keywords, int threads,
          const std::function<Evaluation(const EvaluationContext&)>& evaluate);

}  // namespace foremoe::python
