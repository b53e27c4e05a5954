#pragma once

// What `plan`, `compare`, `simulate` and `report` have in common: an input, how to plan, and on what to model time.

#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "console.h"
#include "foremoe/evaluate/cost_request.h"
#include "foremoe/evaluate/evaluate.h"

namespace foremoe::cli {

struct PlanningArguments {
  InputOptions input;
  EvaluateOptions evaluate;
  CostRequest cost;
  std::vector<std::string> policies{"all"};
  int threads = 0;  // 0: as many as processors
  bool json = false;
};

// INPUT, batching, planning, and the cluster and model. Residency `auto` is there where a command simulates.
std::vector<Option> planning_options(PlanningArguments& arguments, bool residency_auto);

// The arguments, read and held against each other. What was done that nobody asked for is noted on stderr.
struct PlanningSession {
  // `simulates`: a cluster is needed; the model may be the one that fits the input.
  PlanningSession(PlanningArguments& arguments, const Given& given, bool simulates);

  EvaluationContext context() {
    return {.pool = pool, .cost = cost ? &*cost : nullptr, .progress = std::ref(progress)};
  }

  ThreadPool pool;
  Progress progress;
  StepInput input;
  std::optional<CostModel> cost;
};

// Notes the options that were given and have no effect on this input.
void note_unused_on_input(const Given& given, const StepInput& input, const PlannerOptions& options);

// "1 guest slot per rank and layer, residency resident, 1 micro-step in flight".
std::string describe(const EvaluateOptions& options);

}  // namespace foremoe::cli
