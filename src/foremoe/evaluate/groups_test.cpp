// Compares evaluations of a job with those of its groups, and tests where groups may begin.

#include "foremoe/evaluate/groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/testing/evaluated_step.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

class Groups : public test::EvaluatedStep {
 protected:
  std::vector<std::vector<Evaluation>> evaluate_groups(const std::vector<const Policy*>& policies, int ep) {
    std::vector<std::vector<Evaluation>> all;
    for (const Workload& group : split_groups(input_, ep)) {
      all.push_back(evaluate_all(policies, group, {}, {.pool = pool_, .cost = &cost_}));
    }
    return all;
  }
};

std::string refusal(const LoadTable& load, int ep) {
  try {
    (void)split_groups(make_workload(load), ep);
    return "";
  } catch (const InputError& error) {
    return error.where().field + ": " + error.problem();
  }
}

TEST_F(Groups, LieWithinANodeOrBeginAtItsBoundary) {
  for (const int per_node : {1, 2, 3, 4, 8}) {
    for (const int ep : {1, 2, 4, 8}) {
      LoadTable load = input_.load;
      load.ranks_per_node = per_node;
      bool fits = true;
      for (int first = 0; first < 8; first += ep) {
        std::vector<int> nodes;
        for (int r = first; r < first + ep; ++r) nodes.push_back(r / per_node);
        fits = fits && (nodes.front() == nodes.back() || first == nodes.front() * per_node);
      }
      EXPECT_EQ(refusal(load, ep).empty(), fits) << per_node << " ranks per node, groups of " << ep;
      if (!fits) continue;
      for (const Workload& group : split_groups(make_workload(load), ep)) {
        EXPECT_EQ(group.load.ranks_per_node, std::min(per_node, ep));
        EXPECT_EQ(group.num_groups_of_job(), 8 / ep);
      }
    }
  }
  LoadTable load = input_.load;
  load.ranks_per_node = 3;
  EXPECT_THAT(refusal(load, 4), testing::AllOf(HasSubstr("ep: 4"), HasSubstr("3 ranks"), HasSubstr("4 to 7")));
  EXPECT_THAT(refusal(load, 3), HasSubstr("8 ranks"));
}

TEST_F(Groups, HaveFiguresOverAllTheirPairs) {
  const Policy* const policy = &policy_named("foremoe");
  const JobEvaluation job = over_groups(evaluate_groups({policy}, 2), 2);
  ASSERT_EQ(job.groups.size(), 4);
  const Evaluation& whole = job.policies.front();
  std::vector<double> rho;
  double slowest = 0;
  for (const std::vector<Evaluation>& group : job.groups) {
    const Evaluation& e = group.front();
    const Array<Tokens, 3> loads = planned_loads(e.plan);
    for (std::size_t m = 0; m < 4; ++m) {
      for (std::size_t l = 0; l < 2; ++l) {
        const auto a = static_cast<double>(loads(m, l, 0).value);
        const auto b = static_cast<double>(loads(m, l, 1).value);
        rho.push_back(2 * std::max(a, b) / (a + b));
      }
    }
    slowest = std::max(slowest, e.step->step_seconds);
    EXPECT_LE(e.figures.max_rank_tokens, whole.figures.max_rank_tokens);
    EXPECT_LE(e.step->memory_bytes_per_rank, whole.step->memory_bytes_per_rank);
  }
  const Spread expected = spread_of(rho, 1);
  EXPECT_EQ(whole.figures.rho.mean, expected.mean);
  EXPECT_EQ(whole.figures.rho.p99, expected.p99);
  EXPECT_EQ(whole.figures.rho.max, expected.max);
  EXPECT_EQ(whole.step->step_seconds, slowest);
  EXPECT_EQ(job.groups[job.slowest.front().group].front().step->step_seconds, slowest);
  EXPECT_THAT(job.slowest.front().why, HasSubstr("× the mean group's step"));
}

TEST_F(Groups, SpeedUpByTheSlowestGroupsOfBothPolicies) {
  const JobEvaluation job = over_groups(evaluate_groups({&policy_named("vanilla"), &policy_named("foremoe")}, 4), 4);
  const double vanilla = job.policies[0].step->step_seconds;
  EXPECT_EQ(vanilla, std::max(job.groups[0][0].step->step_seconds, job.groups[1][0].step->step_seconds));
  EXPECT_NEAR(job.policies[1].speedup_over_vanilla, vanilla / job.policies[1].step->step_seconds, 1e-12);
  EXPECT_NEAR(job.policies[0].speedup_over_vanilla, 1, 1e-12);
}

TEST_F(Groups, ThatAreNotSplitChangeNothing) {
  std::vector<std::vector<Evaluation>> one(1);
  one[0] = evaluate_all(std::vector{&policy_named("vanilla")}, input_, {}, {.pool = pool_});
  const double rho = one[0][0].figures.rho.mean;
  const JobEvaluation job = over_groups(std::move(one), 0);
  EXPECT_EQ(job.policies.front().figures.rho.mean, rho);
  EXPECT_TRUE(job.groups.empty());
}

TEST_F(Groups, FitIfEveryGroupFitsAndNameRanksOfTheJob) {
  std::vector<Fit> fits;
  for (const Workload& group : split_groups(input_, 4)) {
    fits.push_back(fit({.policy = policy_named("foremoe"), .workload = group}, {.memory_budget_gigabytes = 1},
                       {.pool = pool_, .cost = &cost_}));
  }
  const JobFit job = over_groups(fits, 4);
  for (const auto of : {&Fit::now, &Fit::planned}) {
    const FitOfPlan& whole = job.whole.*of;
    ASSERT_EQ(whole.ranks.size(), 8);
    for (std::size_t r = 0; r < 8; ++r) EXPECT_EQ(whole.ranks[r].rows, (fits[r / 4].*of).ranks[r % 4].rows);
    for (const auto peak : {&FitPeak::rows}) {
      EXPECT_EQ(whole.most_rows.rows, std::ranges::max(whole.ranks, {}, peak).rows);
      EXPECT_EQ(whole.ranks[whole.most_rows.rank.index()].rows, whole.most_rows.rows);
      EXPECT_EQ(whole.micro_steps[whole.most_rows.micro_step.index()].rows, whole.most_rows.rows);
    }
    EXPECT_EQ(whole.most_memory.memory, std::ranges::max(whole.ranks, {}, &FitPeak::memory).memory);
    EXPECT_EQ(whole.ranks[whole.most_memory.rank.index()].memory, whole.most_memory.memory);
    EXPECT_TRUE(whole.exceeds.has_value());
    for (std::size_t c = 0; c < whole.capacities.size(); ++c) {
      EXPECT_EQ(whole.capacities[c].smallest,
                std::max((fits[0].*of).capacities[c].smallest, (fits[1].*of).capacities[c].smallest));
    }
  }
  EXPECT_FALSE(job.whole.fewest_guest_slots.has_value());
  EXPECT_EQ(job.whole.tried.size(), 5);
}

TEST_F(Groups, ExceedALimitFirstWhereAnyGroupDoes) {
  std::vector<Workload> groups = split_groups(input_, 4);
  const auto fits_with = [&](double gigabytes) {
    std::vector<Fit> fits;
    for (const Workload& group : groups) {
      fits.push_back(fit({.policy = policy_named("vanilla"), .workload = group, .most_guest_slots = 0},
                         {.memory_budget_gigabytes = gigabytes}, {.pool = pool_, .cost = &cost_}));
    }
    return fits;
  };
  const JobFit free = over_groups(fits_with(1000), 4);
  EXPECT_FALSE(free.whole.now.exceeds.has_value());
  EXPECT_EQ(free.whole.fewest_guest_slots, 0);
  const double limit = static_cast<double>(free.whole.now.most_memory.memory.value) / 1e9;
  for (Tokens& tokens : groups[0].load.load[3].flat()) tokens = Tokens{4 * tokens.value};
  for (Tokens& tokens : groups[1].load.load[1].flat()) tokens = Tokens{4 * tokens.value};
  const std::vector<Fit> fits = fits_with(limit);
  EXPECT_EQ(fits[0].now.exceeds->micro_step, MicroStepId{3});
  ASSERT_EQ(fits[0].now.exceeds->phase, fits[1].now.exceeds->phase);
  const FitPlace place = *over_groups(fits, 4).whole.now.exceeds;
  EXPECT_EQ(place.micro_step, MicroStepId{1});
  EXPECT_EQ(place.rank.value, 4 + fits[1].now.exceeds->rank.value);
}

TEST(GroupPaths, PutTheGroupBeforeTheExtension) {
  EXPECT_EQ(group_path("plan.safetensors", 3), "plan-group3.safetensors");
  EXPECT_EQ(group_path("a.b/plan", 12), "a.b/plan-group12");
  EXPECT_EQ(group_path("step.load.safetensors", 0), "step.load-group0.safetensors");
}

}  // namespace
}  // namespace foremoe
