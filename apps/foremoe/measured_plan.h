#pragma once

// A policy run on an input, with its figures: what `plan` prints one of and `compare` a table of.

#include <nlohmann/json_fwd.hpp>
#include <variant>

#include "foremoe/plan/plan_figures.h"
#include "foremoe/policy/policy.h"
#include "planner_arguments.h"

namespace foremoe::cli {

struct MeasuredPlan {
  StepPlan plan;
  PlanTimes times;
  PlanFigures figures;
  int threads = 1;

  // CPU time of all planning but stage B, µs.
  double us_per_layer_micro_step() const;
};

struct MeasureProblem {
  const Policy& policy;
  const PlanningInput& input;
  PlannerOptions options;
  int align = 128;  // tokens
};

std::variant<MeasuredPlan, Skipped> measure(const MeasureProblem& problem, ThreadPool& pool);

// The keys that docs/formats.md lists, in that order.
nlohmann::ordered_json to_json(const MeasuredPlan& measured);

// By name; throws InputError that lists the names there are.
const Policy& policy_named(const std::string& name);

// Names, or "all"; in the order given.
std::vector<const Policy*> policies_named(const std::vector<std::string>& names);

// "  vanilla  homes serve everything …", a line for each policy.
std::string list_of_policies();

}  // namespace foremoe::cli
