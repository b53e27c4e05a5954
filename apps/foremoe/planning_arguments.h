#pragma once

// Arguments shared by `plan`, `compare` and `simulate`: input, planning and the modelled cluster.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "console.h"
#include "foremoe/evaluate/cost_request.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/groups.h"
#include "progress.h"

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

// Returns INPUT and the options for batching, planning, cluster and model. residency_auto: offer residency `auto`.
std::vector<Option> planning_options(PlanningArguments& arguments, bool residency_auto);

// Returns all input files that the arguments name, for expect_output().
std::vector<std::string> files_of(const InputOptions& input);
std::vector<std::string> files_of(const PlanningArguments& arguments);

// Returns how many layers of the model a layer of the load represents; an empty text if the load has all of them.
std::string describe_layers(const LoadTable& load, const CostModel& cost);

// A command's requirements on the shared arguments.
struct SessionRequest {
  std::vector<std::string> policies;  // names; "all" stands for every system
  bool one_policy = false;
  bool simulates = false;             // a cluster is required; the default model is the one that fits the input
  std::string output = {};            // output file; empty: none
  const char* output_option = "out";  // the option that names it
};

// Reads the input and checks that the arguments are consistent. Reports automatic decisions on stderr.
struct PlanningSession {
  PlanningSession(const PlanningArguments& arguments, const Given& given, const SessionRequest& request);

  EvaluationContext context() {
    return {.pool = pool, .cost = cost ? &*cost : nullptr, .progress = std::ref(progress)};
  }

  // Evaluates the groups one after another. evaluate(group, context) returns its evaluation.
  template <class Evaluate>
  auto each_group(Evaluate&& evaluate) {
    std::vector<decltype(evaluate(groups.front(), context()))> results;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      results.push_back(evaluate(groups[g], one_of(context(), g, groups.size())));
    }
    return over_groups(std::move(results), groups.front().asked.ep);
  }

  std::string describe_input() const;  // "step.load.safetensors: 14 micro-steps …"
  std::string output_of(const std::string& path, std::size_t group) const;  // with --ep, a file per group

  ThreadPool pool;
  Progress progress{&pool.parts()};
  std::vector<std::shared_ptr<const Policy>> owned;
  std::vector<const Policy*> policies;  // with the options set by the arguments
  std::vector<Workload> groups;         // one without --ep
  std::optional<CostModel> cost;
  std::optional<Residency> residency;  // residency that the plan must have; set if it was given and there is one policy
};

// "8–15": the ranks of a group.
std::string describe_ranks(std::size_t group, int ep);

// Prints each group's figures, and each policy's slowest group. Prints nothing if the job was not split.
void print_groups(const JobEvaluation& job);

// Returns the list of policies and their options, for commands with --policy-option.
std::string list_of_policies_and_their_options();

// Example: "1 guest slot per rank and layer, residency resident, 1 micro-step in flight".
std::string describe(const PlanChoice& choice);
std::string describe(const EvaluateOptions& options);

}  // namespace foremoe::cli
