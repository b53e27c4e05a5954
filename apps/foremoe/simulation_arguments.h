#pragma once

// What commands that simulate a step let the user say besides cluster and model.

#include <CLI/CLI.hpp>
#include <string>

#include "cost_arguments.h"
#include "planner_arguments.h"
#include "simulated_policy.h"

namespace foremoe::cli {

struct SimulationArguments {
  double rollout_seconds = 0;
  double memory_budget_gigabytes = 0;  // 10⁹ bytes of one rank; 0: none
  int depth = kDefaultDepth;           // turns
  PathChoice path = PathChoice::kAuto;
};

// `budget_use` tells what the command does with a memory budget: text of the help.
void add_simulation_options(CLI::App& command, SimulationArguments& arguments, const std::string& budget_use);
void add_memory_budget_option(CLI::App& command, double& gigabytes, const std::string& use);

// Refers to the cost model. The planner's arguments say whether the residency is to be chosen.
SimulationSetup simulation_setup(const SimulationArguments& arguments, const CostModel& cost,
                                 const PlannerArguments& planner);

// As cost_model(), and without --model the one model that the load can be of. Throws InputError that lists those that
// fit when it is not one.
CostModel cost_model_for(CostArguments arguments, const LoadTable& load);

}  // namespace foremoe::cli
