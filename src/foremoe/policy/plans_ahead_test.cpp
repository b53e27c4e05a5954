// Policy::plans_ahead() is true exactly for plans that depend on the step's routes before the router has chosen them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/policy/policy.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::plan_of;
using test::PlanRun;
using test::result_of;

// Returns whether the placement in micro-step 0 depends on the loads of micro-steps [`first`, `end`).
bool first_micro_step_depends_on(int first, int end, std::string_view policy, const PlanRun& run) {
  LoadTable other = run.load;
  for (int m = first; m < end; ++m) {
    for (int r = 0; r < other.num_ranks(); ++r) std::ranges::reverse(other.load.row(m, 0, r));
  }
  const auto held = [&](const LoadTable& load) {
    const StepPlan plan = plan_of(policy, {.load = load, .options = run.options, .previous_load = run.previous_load});
    const auto slots = plan.slot_expert.view()[0].flat();
    return std::pair(plan.home, std::vector(slots.begin(), slots.end()));
  };
  return held(run.load) != held(other);
}

// Two experts per rank, two nodes, and popularity that changes between micro-steps.
LoadTable skewed_load(int shift) {
  LoadTable load = test::random_load({.micro_steps = 4, .layers = 1, .ranks = 8, .experts = 16, .ranks_per_node = 4},
                                     21 + shift, 400);
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    for (int r = 0; r < load.num_ranks(); ++r) {
      for (int e = 0; e < load.num_experts(); ++e) {
        Tokens& tokens = load.load(m, 0, r, e);
        tokens = Tokens{tokens.value * 16 / (4 + (e * 7 + m * 3 + shift) % 32)};
      }
    }
  }
  return load;
}

TEST(PlansAhead, IsTrueIfAPlanNeedsRoutesThatTheRouterHasNotChosen) {
  const LoadTable load = skewed_load(0);
  const LoadTable former_load = skewed_load(5);
  const Array<RankId, 2> home = contiguous_homes(1, 16, 8);
  for (const Policy* const policy : all_policies()) {
    const OnlineWork online = policy->online();
    const bool follows_router =
        online.copies_after_router || online.planning_seconds > 0 || online.planning_seconds_per_slot > 0;
    EXPECT_EQ(online.gathers_loads, follows_router) << policy->name() << " plans by the counts of all ranks";
    for (const LoadTable* const former : {static_cast<const LoadTable*>(nullptr), &former_load}) {
      bool needs_later = false;
      bool needs_own = false;
      for (const int guest_slots : {1, 4}) {
        const PlanRun run{.load = load, .options = {.guest_slots = guest_slots}, .previous_load = former};
        if (std::holds_alternative<Skipped>(result_of(policy->name(), run))) continue;
        needs_own |= first_micro_step_depends_on(0, 1, policy->name(), run);
        needs_later |= first_micro_step_depends_on(1, load.num_micro_steps(), policy->name(), run);
      }
      const bool expected = needs_later || (needs_own && !follows_router);
      EXPECT_EQ(policy->plans_ahead({.load = load, .home = home, .options = {}, .previous_load = former}), expected)
          << policy->name() << (former != nullptr ? " with a former step" : "");
    }
  }
}

}  // namespace
}  // namespace foremoe
