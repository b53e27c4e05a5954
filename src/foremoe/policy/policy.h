#pragma once

// Common interface to the planners of all systems, for fair comparisons. A policy turns loads into a plan that
// `check_plan` accepts, or returns the reason why it is not defined for the input.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "foremoe/cluster/online_work.h"
#include "foremoe/core/option.h"
#include "foremoe/core/parallel.h"
#include "foremoe/planner/planner.h"

namespace foremoe {

struct PolicyInput {
  const LoadTable& load;
  ArrayView<const RankId, 2> home;           // [layer][expert]
  PlannerOptions options = {};               // each policy reads the ones that it supports
  const StepPlan* previous = nullptr;        // an earlier step's plan, for warm starts
  const LoadTable* previous_load = nullptr;  // an earlier step's load, for policies that predict from history
  // See PlanRequest::on_micro_step. Only policies that plan micro-step by micro-step call it.
  std::function<void(const StepPlan&, MicroStepId)> on_micro_step = {};
};

struct Skipped {
  std::string reason;
};

using PolicyResult = std::variant<PlannedStep, Skipped>;

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual std::string_view summary() const = 0;  // one line for `--help`
  virtual OnlineWork online() const { return {}; }
  // Returns whether the step is planned ahead from its own recorded routes. If so, it waits for the planning that
  // precedes its first micro-step. False if the plan uses an earlier step's routes, the router's output, or no routes.
  virtual bool plans_ahead(const PolicyInput& input) const = 0;
  virtual PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const = 0;
  // Returns whether plans have the residency and the preference that the options name, so that these can be chosen.
  virtual bool plans_as_asked() const { return false; }
  // Returns whether some layers may be planned alone, as they are planned together.
  virtual bool plans_layers_alone() const { return false; }
  // Returns why plans with these options do not start from an earlier one (PolicyInput::previous); empty if they do.
  virtual std::string why_cold(const PlannerOptions& options) const;

  // Options that only this system has, bound to variables of this object. A system with such options also implements
  // copy(), because the registered objects below never change (own_options.h).
  virtual std::vector<Option> options() { return {}; }
  virtual std::unique_ptr<Policy> copy() const { return nullptr; }
};

// Every system once, in the order of the tables. `compare --policy all` runs these.
const std::vector<std::unique_ptr<Policy>>& all_systems();
// Variants of these systems: ablations and other token splits. Selected only by name.
const std::vector<std::unique_ptr<Policy>>& all_variants();

std::vector<const Policy*> all_policies();         // systems, then variants
const Policy* find_policy(std::string_view name);  // nullptr if unknown

// Throw InputError (field `policy`) with the valid names for an unknown name. In a list, "all" means every system.
const Policy& policy_named(const std::string& name);
std::vector<const Policy*> policies_named(const std::vector<std::string>& names);

}  // namespace foremoe
