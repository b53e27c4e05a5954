// Policy::uses() held to behaviour: a plan depends on the fields that it lists and on no other. plans_ahead() too: a
// plan that depends on the step's own routes before they are computed is made ahead.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "foremoe/policy/policy.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::all_names;
using test::plan_of;
using test::PlanRun;
using test::result_of;
using testing::HasSubstr;

// Inputs of two nodes on which every field that a policy uses makes a difference, and what the field is changed to.
class UsedFields : public testing::Test {
 protected:
  // clang-format off
  static constexpr std::string_view kFields[] = {
      "guest_slots", "residency", "in_flight", "stages", "prefer", "tolerance", "rehome", "max_copies_per_rank",
      "max_copies_per_source", "min_tokens_per_guest", "seed", "previous", "previous_load"};
  // clang-format on

  // The runs that differ from `run` in this field alone.
  std::vector<PlanRun> changed(const PlanRun& run, std::string_view field) const {
    const std::size_t count = field == "stages" ? 4 : field == "previous" ? formers_.size() : field == "seed" ? 8 : 1;
    std::vector<PlanRun> runs(count, run);
    PlannerOptions& o = runs.front().options;
    if (field == "guest_slots") o.guest_slots = 12;
    if (field == "residency") o.residency = o.residency == Residency::kShared ? Residency::kStatic : Residency::kShared;
    if (field == "in_flight") o.in_flight = 3;
    if (field == "stages") {
      runs[0].options.stages.base = false;
      runs[1].options.stages.replication = false;
      runs[2].options.stages.tokens = false;
      runs[3].options.stages.relocation = false;
    }
    if (field == "prefer") o.prefer = Prefer::kLinks;
    if (field == "tolerance") o.tolerance = 0.3;
    if (field == "rehome") o.rehome = 4;
    if (field == "max_copies_per_rank") o.max_copies_per_rank = 0;
    if (field == "max_copies_per_source") o.max_copies_per_source = 0;
    if (field == "min_tokens_per_guest") o.min_tokens_per_guest = 400;
    for (std::size_t i = 0; field == "seed" && i < runs.size(); ++i) runs[i].options.seed = 12345 + i;
    for (std::size_t i = 0; field == "previous" && i < runs.size(); ++i) runs[i].previous = &formers_[i];
    if (field == "previous_load") runs.front().previous_load = &former_;
    return runs;
  }

  // All that a plan says, but for the options that it records as they were given.
  static bool same(const PolicyResult& a, const PolicyResult& b) {
    if (a.index() != b.index()) return false;
    if (std::holds_alternative<Skipped>(a)) return std::get<Skipped>(a).reason == std::get<Skipped>(b).reason;
    const StepPlan& p = std::get<PlannedStep>(a).plan;
    const StepPlan& q = std::get<PlannedStep>(b).plan;
    return p.slot_expert == q.slot_expert && p.slot_tokens == q.slot_tokens && p.home == q.home &&
           p.event_micro_step == q.event_micro_step && p.event_pass == q.event_pass && p.max_load == q.max_load &&
           p.residency == q.residency && p.guest_slots == q.guest_slots && p.in_flight == q.in_flight;
  }

  // Whether the policy's plan depends on the field, with any of a few options around it.
  bool matters(std::string_view policy, std::string_view field) {
    for (const int guest_slots : {1, 4, 8}) {
      const PlannerOptions options{.guest_slots = guest_slots};
      if (std::holds_alternative<Skipped>(result_of(policy, {.load = former_, .options = options}))) continue;
      // Of load_ itself, drawn otherwise: it fits from the first micro-step on; and of other steps.
      formers_ = {plan_of(policy, {.load = load_, .options = {.guest_slots = guest_slots, .seed = 99}})};
      for (int step = 0; field == "previous" && step < num_former_steps(policy); ++step) {
        formers_.push_back(plan_of(policy, {.load = skewed_load(5 + step), .options = options}));
      }
      for (const Residency residency : {Residency::kResident, Residency::kStatic, Residency::kShared}) {
        for (const Prefer prefer : {Prefer::kBalance, Prefer::kLinks}) {
          const PlanRun run{.load = load_,
                            .options = {.guest_slots = guest_slots, .residency = residency, .prefer = prefer}};
          const PolicyResult before = result_of(policy, run);
          for (const PlanRun& other : changed(run, field)) {
            if (!same(before, result_of(policy, other))) return true;
          }
        }
      }
    }
    return false;
  }

  // Whether what the ranks hold in the first micro-step depends on the loads of micro-steps first, …, end − 1.
  bool first_micro_step_depends_on(int first, int end, std::string_view policy, const PlanRun& run) const {
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

  // A former plan is taken only where it is no worse than none, for `static` once in a hundred steps.
  static int num_former_steps(std::string_view policy) {
    return std::ranges::count(find_policy(policy)->uses(), "previous") > 0 ? 100 : 1;
  }

  // Four experts to a rank, two nodes, and popularity that changes from micro-step to micro-step.
  static LoadTable skewed_load(int shift) {
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

  const LoadTable load_ = skewed_load(0);
  const LoadTable former_ = skewed_load(5);
  std::vector<StepPlan> formers_;
};

TEST_F(UsedFields, AreThoseOnWhichPlansDepend) {
  for (const std::string_view policy : all_names()) {
    const auto uses = find_policy(policy)->uses();
    EXPECT_EQ(std::set(uses.begin(), uses.end()).size(), uses.size()) << policy;
    for (const std::string_view field : uses) EXPECT_EQ(std::ranges::count(kFields, field), 1) << field;
    for (const std::string_view field : kFields) {
      EXPECT_EQ(matters(policy, field), std::ranges::count(uses, field) > 0) << policy << " and " << field;
    }
  }
}

TEST_F(UsedFields, AreTheStepsOwnRoutesAheadOfThemWhereAPolicySaysSo) {
  const Array<RankId, 2> home = contiguous_homes(1, 16, 8);
  for (const Policy* const policy : all_policies()) {
    const OnlineWork online = policy->online();
    const bool follows_router =
        online.copies_after_router || online.planning_seconds > 0 || online.planning_seconds_per_slot > 0;
    EXPECT_EQ(online.gathers_loads, follows_router) << policy->name() << " plans by the counts of all ranks";
    for (const LoadTable* const former : {static_cast<const LoadTable*>(nullptr), &former_}) {
      bool needs_later = false;
      bool needs_own = false;
      for (const int guest_slots : {1, 4}) {
        const PlanRun run{.load = load_, .options = {.guest_slots = guest_slots}, .previous_load = former};
        if (std::holds_alternative<Skipped>(result_of(policy->name(), run))) continue;
        needs_own |= first_micro_step_depends_on(0, 1, policy->name(), run);
        needs_later |= first_micro_step_depends_on(1, load_.num_micro_steps(), policy->name(), run);
      }
      const bool expected = needs_later || (needs_own && !follows_router);
      EXPECT_EQ(policy->plans_ahead({.load = load_, .home = home, .options = {}, .previous_load = former}), expected)
          << policy->name() << (former != nullptr ? " with a former step" : "");
    }
  }
}

TEST_F(UsedFields, SayWhatBecomesOfAFormerPlanThatIsNotTaken) {
  const Array<RankId, 2> home = contiguous_homes(1, 32, 8);
  const auto note = [&](std::string_view policy, int guest_slots) {
    return find_policy(policy)->note_on_previous(
        {.load = load_, .home = home, .options = {.guest_slots = guest_slots}, .previous = &formers_.front()});
  };
  formers_ = {plan_of("flexmoe", {.load = former_, .options = {.guest_slots = 4}})};
  EXPECT_EQ(note("flexmoe", 4), "");
  EXPECT_THAT(note("flexmoe", 3), HasSubstr("it has 4 guest slots, not 3"));
  EXPECT_THAT(note("foremoe-review", 4), HasSubstr("by policy flexmoe"));
  EXPECT_THAT(note("eplb", 4), HasSubstr("policy eplb does not start from one"));
  EXPECT_THAT(note("foremoe", 4), HasSubstr("residency free"));
  for (const Policy* policy : all_policies()) {
    EXPECT_EQ(policy->note_on_previous({.load = load_, .home = home, .options = {}}), "") << policy->name();
  }
}

}  // namespace
}  // namespace foremoe
