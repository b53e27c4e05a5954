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

// Every input file that the arguments name, for expect_output().
std::vector<std::string> files_of(const InputOptions& input);

// What one command asks of the arguments that all three have.
struct SessionRequest {
  std::vector<std::string> policies;  // names; "all" stands for every system
  bool one_policy = false;
  bool simulates = false;             // a cluster is needed; the model may be the one that fits the input
  std::string output = {};            // a file that will be written; empty: none
  const char* output_option = "out";  // which names it
};

// The arguments, read and held against each other. What was done that nobody asked for, and what was asked for and has
// no effect, is noted on stderr.
struct PlanningSession {
  PlanningSession(const PlanningArguments& arguments, const Given& given, const SessionRequest& request);

  EvaluationContext context() {
    return {.pool = pool, .cost = cost ? &*cost : nullptr, .progress = std::ref(progress)};
  }

  ThreadPool pool;
  Progress progress;
  std::vector<std::shared_ptr<const Policy>> owned;
  std::vector<const Policy*> policies;  // with the options that the arguments set for them
  Workload input;
  std::optional<CostModel> cost;
  std::optional<Residency> residency;  // that the plan must have, where it was given for one policy alone
};

// What `meaning` says of policies where --policy-option is there.
std::string list_of_policies_and_their_options();

// "1 guest slot per rank and layer, residency resident, 1 micro-step in flight".
std::string describe(const EvaluateOptions& options);

}  // namespace foremoe::cli
