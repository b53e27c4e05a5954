#pragma once

// Runs of policies for tests, with contiguous homes. plan_of(policy, PolicyRun) also expects a plan without violations.

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "foremoe/plan/check_plan.h"
#include "foremoe/policy/policy.h"
#include "foremoe/policy/systems/finemoe/replica_load_lp.h"

namespace foremoe::test {

// A run with any options. The plan is not checked.
struct PlanRun {
  const LoadTable& load;
  PlannerOptions options = {};
  const StepPlan* previous = nullptr;
  const LoadTable* previous_load = nullptr;
  std::size_t threads = 1;
};

inline PolicyResult run_policy(const Policy& policy, const PlanRun& run) {
  const Array<RankId, 2> home = contiguous_homes(run.load.num_layers(), run.load.num_experts(), run.load.num_ranks());
  ThreadPool pool(run.threads);
  return policy.plan({.load = run.load,
                      .home = home,
                      .options = run.options,
                      .previous = run.previous,
                      .previous_load = run.previous_load},
                     pool);
}

inline PolicyResult result_of(std::string_view policy, const PlanRun& run) {
  return run_policy(*find_policy(policy), run);
}

inline StepPlan plan_of(std::string_view policy, const PlanRun& run) {
  return std::get<PlannedStep>(result_of(policy, run)).plan;
}

// Returns the names of all policies that this build can run.
inline std::vector<std::string_view> all_names() {
  std::vector<std::string_view> names;
  for (const Policy* policy : all_policies()) {
    const bool needs_clp = policy->name().starts_with("finemoe");
    if (!needs_clp || finemoe::ReplicaLoadLp::is_available()) names.push_back(policy->name());
  }
  return names;
}

struct PolicyRun {
  const LoadTable& load;
  int guest_slots = 1;
  int in_flight = 1;
  const StepPlan* previous = nullptr;
  const LoadTable* previous_load = nullptr;
  std::uint64_t seed = 0;
};

inline PolicyResult result_of(const Policy& policy, const PolicyRun& run) {
  return run_policy(policy, {.load = run.load,
                             .options = {.guest_slots = run.guest_slots, .in_flight = run.in_flight, .seed = run.seed},
                             .previous = run.previous,
                             .previous_load = run.previous_load});
}

inline StepPlan plan_of(const Policy& policy, const PolicyRun& run) {
  PolicyResult result = result_of(policy, run);
  StepPlan plan = std::move(std::get<PlannedStep>(result).plan);
  const PlanFigures figures = plan_figures(plan, run.load);
  const CheckReport report = check_plan(plan, run.load, {.reported = &figures});
  for (const Violation& v : report.violations) ADD_FAILURE() << plan.policy << ": " << v.message;
  return plan;
}

// Returns the experts in a rank's slots in the first layer, by slot; −1 if empty.
inline std::vector<int> experts(const StepPlan& plan, int event, int rank) {
  std::vector<int> row;
  for (const ExpertId e : plan.slot_expert.row(event, 0, rank)) row.push_back(e.value);
  return row;
}

inline std::vector<std::int64_t> tokens(const StepPlan& plan, int event, int rank) {
  std::vector<std::int64_t> row;
  for (const Tokens t : plan.slot_tokens.row(event, 0, rank)) row.push_back(t.value);
  return row;
}

}  // namespace foremoe::test
