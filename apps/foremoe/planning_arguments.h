#pragma once

// What `plan`, `compare` and `simulate` have in common: an input, how to plan, and on what to model time.

#include <memory>
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
  std::vector<std::string> policy_options;  // "NAME=VALUE"
  int threads = 0;                          // 0: as many as processors
  bool json = false;
};

// INPUT, batching, planning, and the cluster and model. Residency `auto` is there where a command simulates.
std::vector<Option> planning_options(PlanningArguments& arguments, bool residency_auto);

// These policies with the options that the arguments set for them.
std::vector<std::shared_ptr<const Policy>> policies_of(const std::vector<const Policy*>& named,
                                                       const PlanningArguments& arguments);
std::vector<const Policy*> pointers_to(const std::vector<std::shared_ptr<const Policy>>& policies);

// Every file that the arguments name, for expect_output().
std::vector<std::string> files_of(const InputOptions& input);
std::vector<std::string> files_of(const PlanningArguments& arguments);

// The arguments, read and held against each other. What was done that nobody asked for is noted on stderr.
struct PlanningSession {
  // `simulates`: a cluster is needed; the model may be the one that fits the input.
  PlanningSession(PlanningArguments& arguments, bool simulates);

  EvaluationContext context() {
    return {.pool = pool, .cost = cost ? &*cost : nullptr, .progress = std::ref(progress)};
  }

  ThreadPool pool;
  Progress progress;
  StepInput input;
  std::optional<CostModel> cost;
};

// Notes which of the options that were given have no effect.
void note_unused(const Given& given, const std::vector<const Policy*>& policies, const StepInput& input,
                 const PlannerOptions& options);

// Throws InputError where one policy alone was asked for a residency that its plan does not have.
void expect_residency(const Given& given, const EvaluateOptions& options, const std::vector<Evaluation>& evaluations);

// What `meaning` says of policies where --policy-option is there.
std::string list_of_policies_and_their_options();

// "1 guest slot per rank and layer, residency resident, 1 micro-step in flight".
std::string describe(const EvaluateOptions& options);

}  // namespace foremoe::cli
