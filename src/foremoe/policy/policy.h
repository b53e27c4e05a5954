#pragma once

// Every system's planner behind one interface, so that comparisons are on equal terms: loads in, a plan out
// that `check_plan` accepts, or the reason why the policy is not defined for this input.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/core/parallel.h"
#include "foremoe/planner/planner.h"
#include "foremoe/policy/online_work.h"

namespace foremoe {

struct PolicyInput {
  const LoadTable& load;
  ArrayView<const RankId, 2> home;           // [layer][expert]
  PlannerOptions options;                    // each policy reads those that it knows
  const StepPlan* previous = nullptr;        // a former step's plan, for warm starts
  const LoadTable* previous_load = nullptr;  // a former step's load, for policies that predict from history
  // As PlanRequest has it, for policies that plan micro-step by micro-step; others never call it.
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
  // Whether the step is planned ahead, from its own recorded routes: then it waits for what is planned before its first
  // micro-step. Not where a plan follows former routes, or the router, or no routes at all.
  virtual bool plans_ahead(const PolicyInput& input) const = 0;
  virtual PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const = 0;

  // Options that this system alone has: variables of this object. A system that has some has copy() too, since those
  // that are registered below are never changed (own_options.h).
  virtual std::vector<Option> options() { return {}; }
  virtual std::unique_ptr<Policy> copy() const { return nullptr; }
};

// Each system once, in the order in which tables show them: what `compare --policy all` compares.
const std::vector<std::unique_ptr<Policy>>& all_systems();
// Variants of these systems: halves of one for ablations, other token splits. Found by their names alone.
const std::vector<std::unique_ptr<Policy>>& all_variants();

std::vector<const Policy*> all_policies();         // systems, then variants
const Policy* find_policy(std::string_view name);  // nullptr when there is none

// Throws InputError, field `policy`, that lists the names there are. In a list "all" is every system.
const Policy& policy_named(const std::string& name);
std::vector<const Policy*> policies_named(const std::vector<std::string>& names);

}  // namespace foremoe
