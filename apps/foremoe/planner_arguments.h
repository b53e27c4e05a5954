#pragma once

// What `plan`, `compare` and `run` let the user ask of a planner, and the files that these options name.

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/planner/planner_options.h"
#include "foremoe/policy/policy.h"
#include "foremoe/rollout/load_table.h"
#include "input_options.h"

namespace foremoe::cli {

inline constexpr std::string_view kContiguous = "contiguous";

struct PlannerArguments {
  PlannerOptions options;
  std::string homes{kContiguous};
  std::string previous;           // a plan file; empty: none
  std::string previous_load;      // a trace or load file; empty: none
  bool models_cost = false;       // the command has --cluster and --model: set before add_planner_options()
  bool simulates = false;         // and can choose the residency by what it makes a step take: likewise
  bool choose_residency = false;  // --residency auto
  bool hidden_copies = false;     // --max-copies-per-rank hidden: the budget is cost_arguments.h's within_cost()
  int align = 128;                // tokens
  int threads = 0;                // 0: all processors
};

void add_planner_options(CLI::App& command, PlannerArguments& arguments);
void add_homes_option(CLI::App& command, std::string& homes);
// --policy A,B,…; what `policies` holds is the default.
void add_policies_option(CLI::App& command, std::vector<std::string>& policies);
void add_align_option(CLI::App& command, int& align);
void add_threads_option(CLI::App& command, int& threads);

// Homes before the plan, [layer][expert]: contiguous, or those that a plan file ends with. Throws InputError when
// they do not fit the load.
Array<RankId, 2> initial_homes(const std::string& homes, const LoadTable& load);

// What the options name, read and held against the load. Throws InputError.
struct FormerStep {
  std::optional<StepPlan> plan;
  std::optional<LoadTable> load;
};

// All that policies plan from, read and held against each other.
struct PlanningInput {
  StepInput step;
  Array<RankId, 2> homes;  // [layer][expert], before planning
  FormerStep former;

  PolicyInput for_policy(const PlannerOptions& options) const;  // refers to this object
};
PlanningInput read_planning_input(const InputOptions& input, const PlannerArguments& arguments, ThreadPool& pool);

}  // namespace foremoe::cli
