#pragma once

// The evaluation type exposed to Python, and its construction from keywords.

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "bindings.h"
#include "foremoe/evaluate/cost_request.h"

namespace foremoe::python {

// One policy's evaluation and its inputs.
struct Evaluated {
  std::shared_ptr<const Policy> policy;
  std::shared_ptr<const Workload> input;
  EvaluateOptions options;
  std::optional<Phase> phase;  // if set, only this phase is simulated; else a whole step
  std::optional<CostModel> cost;
  std::shared_ptr<const Evaluation> evaluation;
  nlohmann::ordered_json figures;  // without comparisons with other policies

  Plan plan_of(Phase phase) const;  // throws PolicySkipped
};

// Sets options and cost request from the keywords of evaluate() and evaluate_plan(). Throws InputError for an invalid
// keyword.
void set_options(const nb::dict& keywords, EvaluateOptions& evaluate, CostRequest& cost);

// Sets the options from keywords, and the cost model, evaluation and figures. `evaluate` computes the evaluation from
// the fields that the caller has set.
void fill(Evaluated& e, const nb::dict& keywords, int threads,
          const std::function<Evaluation(const EvaluationContext&)>& evaluate);

}  // namespace foremoe::python
