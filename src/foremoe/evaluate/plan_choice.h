#pragma once

// Chooses how policy foremoe plans a run's steps, by the modelled seconds of one step.
//
// No kind of plan is the best everywhere. Static guests need no copies inside a step, resident guests follow the load,
// and shared guests need memory for a few layers only but are copied at every use. Where copies cost more than balance
// gains, no plan is the best. Trials are compared by the seconds of the step and of its planning. These are estimated:
// with measured times, the choice would differ from run to run.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/units.h"
#include "foremoe/planner/planner_options.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

enum class ChooseAmong : std::uint8_t {
  kGiven,    // nothing: plan as the options say
  kDefault,  // no plan, the plan that the options say, and the same with `static`, or with prefer links
  kPlans,    // `static`, `resident` and `shared`, each with balance, links and time
  kAll       // no plan, and those of kPlans
};

struct PlanTrial {
  bool planned = true;  // false: policy vanilla
  Residency residency = Residency::kResident;
  Prefer prefer = Prefer::kBalance;
  double seconds = 0;  // of the step, with estimated planning
  Bytes memory = {};   // of the rank with the most
};

// "resident, time", "no plan".
std::string to_string(const PlanTrial& trial);

struct PlanChoice {
  std::vector<PlanTrial> trials;  // without a plan first
  std::size_t chosen = 0;
  bool fits = true;  // the chosen trial is within the memory budget

  const PlanTrial& best() const { return trials[chosen]; }
  std::string why() const;  // "no plan: 1.2 s, resident, time: 1.31 s"
};

// The trials to make for these options, without results. The first one does not plan, unless kPlans. `options` has a
// copy price.
std::vector<PlanTrial> trials_among(ChooseAmong among, const PlannerOptions& options);

// Returns the options that plan as the trial does, if it plans. `options` has a copy price.
PlannerOptions options_of(const PlanTrial& trial, PlannerOptions options);

// Chooses the fastest trial within the budget; of equally fast ones, the one that needs less memory, and of those the
// first. If no trial is within the budget, chooses the one that needs the least memory. Requires a trial.
PlanChoice choose_plan(std::vector<PlanTrial> trials, std::optional<Bytes> budget);

// Estimated CPU seconds to plan one layer, as far as a step waits for them. Guests are chosen for all micro-steps at
// once; under `shared`, the step waits for its first micro-step only, unless `fills_arena`.
double estimated_planning_seconds(const LoadTable& load, Residency residency, bool fills_arena);

}  // namespace foremoe
