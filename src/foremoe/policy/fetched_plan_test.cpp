#include "foremoe/policy/placed_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::experts;
using test::tokens;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int _ = -1;  // an empty slot

using Shares = std::vector<Share>;

Share share(int expert, int rank, int tokens) { return {ExpertId{expert}, RankId{rank}, tokens}; }

// Two ranks, four experts, one layer. Rank 1 is the only source; every expert has 10 tokens.
LoadTable tens(std::size_t micro_steps) {
  LoadTable table;
  table.load = Array<Tokens, 4>({micro_steps, 1, 2, 4});
  for (std::size_t m = 0; m < micro_steps; ++m) std::ranges::fill(table.load.row(m, 0, 1), Tokens{10});
  return table;
}

struct Request {
  std::vector<Shares> shares;  // [micro_step]
  int guest_slots = 2;
  int in_flight = 1;
  ArrayView<const RankId, 2> home = {};
};

StepPlan planned(const Request& request) {
  ThreadPool pool(1);
  const LoadTable load = tens(request.shares.size());
  const Array<RankId, 2> contiguous = contiguous_homes(1, 4, 2);
  const auto of_layer = [&](LayerId) {
    return [&](const LayerLoad& of, std::vector<Share>& shares) {
      shares.insert(shares.end(), request.shares[of.micro_step.index()].begin(),
                    request.shares[of.micro_step.index()].end());
    };
  };
  const PolicyResult result =
      plan_fetched({.name = "test", .of_layer = of_layer, .home = request.home},
                   {.load = load,
                    .home = contiguous,
                    .options = {.guest_slots = request.guest_slots, .in_flight = request.in_flight}},
                   pool);
  StepPlan plan = std::get<PlannedStep>(result).plan;
  const PlanFigures figures = plan_figures(plan, load, {.initial_home = contiguous});
  const CheckReport report = check_plan(plan, load, {.initial_home = contiguous, .reported = &figures});
  for (const Violation& v : report.violations) ADD_FAILURE() << to_string(v.kind) << ": " << v.message;
  return plan;
}

// Experts 0 and 3 are at home on rank 1, expert 1 on rank 0, expert 2 on rank 2. Old contents are overwritten.
TEST(FetchedPlan, CountsAndListsTheHomeExpertsOfRanks) {
  const std::vector<std::int64_t> of_expert{5, 6, 0, 7};
  const std::vector<RankId> home{RankId{1}, RankId{0}, RankId{2}, RankId{1}};
  const LayerLoad load{.of_expert = of_expert, .home = home, .topology = {.num_ranks = 3, .ranks_per_node = 3}};
  std::vector<std::int64_t> tokens{9, 9, 9, 9};
  count_at_home(load, tokens);
  EXPECT_THAT(tokens, ElementsAre(6, 12, 0));
  std::vector<std::vector<ExpertId>> experts{{ExpertId{2}}};
  list_at_home(load, experts);
  EXPECT_THAT(experts,
              ElementsAre(ElementsAre(ExpertId{1}), ElementsAre(ExpertId{0}, ExpertId{3}), ElementsAre(ExpertId{2})));
}

TEST(FetchedPlan, ServesRemainingTokensAtHome) {
  const StepPlan plan = planned({.shares = {{share(1, 1, 4), share(0, 1, 10), share(3, 0, 1)}}});
  EXPECT_EQ(plan.residency, Residency::kShared);
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 1, 3, _));
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(0, 6, 1, 0));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(2, 3, 0, 1));  // in ascending order, not in the order of choice
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(10, 9, 10, 4));
  EXPECT_EQ(plan.max_load(0, 0), Tokens{33});
  EXPECT_EQ(plan.lower_bound(0, 0), Tokens{20});
}

TEST(FetchedPlan, KeepsTheSlotOfAGuestThatIsFetchedAgain) {
  const StepPlan plan = planned({.shares = {{share(0, 1, 1), share(1, 1, 1)},
                                            {share(1, 1, 2)},
                                            {share(0, 1, 3), share(1, 1, 3)},
                                            {},
                                            {share(1, 1, 4)}}});
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(experts(plan, 1, 1), ElementsAre(2, 3, _, 1));
  EXPECT_THAT(experts(plan, 2, 1), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(experts(plan, 3, 1), ElementsAre(2, 3, _, _));
  EXPECT_THAT(experts(plan, 4, 1), ElementsAre(2, 3, 1, _));
}

TEST(FetchedPlan, GivesBothPassesOfAMicroStepTheSameGuests) {
  const StepPlan plan =
      planned({.shares = {{share(0, 1, 1)}, {share(1, 1, 2), share(2, 0, 5)}, {share(0, 1, 3)}}, .in_flight = 2});
  ASSERT_EQ(plan.num_events(), 6);  // F0 F1 B0 F2 B1 B2
  for (const auto& [forward, backward] : {std::pair{0, 2}, {1, 4}, {3, 5}}) {
    for (const int rank : {0, 1}) {
      EXPECT_EQ(experts(plan, forward, rank), experts(plan, backward, rank));
      EXPECT_EQ(tokens(plan, forward, rank), tokens(plan, backward, rank));
    }
  }
}

TEST(FetchedPlan, UsesThePolicysHomes) {
  Array<RankId, 2> home({1, 4}, RankId{0});
  home(0, 1) = home(0, 2) = RankId{1};
  const StepPlan plan = planned({.shares = {{share(3, 1, 4)}}, .home = home});
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 3, _, _));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(1, 2, 3, _));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(10, 10, 4, 0));
  EXPECT_EQ(plan_figures(plan, tens(1), {.initial_home = contiguous_homes(1, 4, 2)}).home_moves, 2);
}

TEST(FetchedPlan, CallsThePolicyOncePerLayerAndMicroStep) {
  const LoadTable load = test::random_load({.micro_steps = 3, .layers = 2}, 1);
  const Array<RankId, 2> home = contiguous_homes(2, 8, 4);
  std::vector<std::pair<int, int>> seen;
  const auto of_layer = [&](LayerId layer) {
    return [&, layer](const LayerLoad& of, std::vector<Share>& shares) {
      EXPECT_TRUE(shares.empty());
      EXPECT_EQ(of.layer, layer);
      EXPECT_EQ(of.guest_slots, 3);
      EXPECT_EQ(of.topology.num_nodes(), 2);
      EXPECT_TRUE(std::ranges::equal(of.home, home.row(0)));
      for (int e = 0; e < 8; ++e) {
        EXPECT_EQ(Tokens{of.of_expert[e]}, test::expert_load(load, of.micro_step, layer.value, e));
        EXPECT_EQ(of.by_source(2, e), load.load(of.micro_step, layer, 2, e));
      }
      seen.emplace_back(layer.value, of.micro_step.value);
    };
  };
  ThreadPool pool(1);
  plan_fetched({.name = "test", .of_layer = of_layer},
               {.load = load, .home = home, .options = {.guest_slots = 3, .in_flight = 2}}, pool);
  EXPECT_THAT(seen, ElementsAre(std::pair{0, 0}, std::pair{0, 1}, std::pair{0, 2}, std::pair{1, 0}, std::pair{1, 1},
                                std::pair{1, 2}));
}

TEST(FetchedPlan, IsSkippedIfRanksDoNotDivideExperts) {
  ThreadPool pool(1);
  const LoadTable load = test::random_load({.ranks = 3, .experts = 8}, 1);
  const Array<RankId, 2> home({2, 8});
  const PolicyResult result = plan_fetched({.name = "test"}, {.load = load, .home = home, .options = {}}, pool);
  ASSERT_TRUE(std::holds_alternative<Skipped>(result));
  EXPECT_EQ(std::get<Skipped>(result).reason,
            "8 experts cannot be spread evenly over 3 ranks: their number must be a multiple");
}

TEST(FetchedPlan, NamesTheInvalidOption) {
  const auto message = [](PlannerOptions options) -> std::string {
    ThreadPool pool(1);
    const LoadTable load = tens(1);
    const Array<RankId, 2> home = contiguous_homes(1, 4, 2);
    try {
      plan_fetched({.name = "test"}, {.load = load, .home = home, .options = std::move(options)}, pool);
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message({.guest_slots = -1}), HasSubstr("guest_slots: -1 is not in 0 … 65536"));
  EXPECT_THAT(message({.in_flight = 0}), HasSubstr("in_flight: 0 is less than 1"));
}

// The contract is checked by assertions only, so there is nothing to test with NDEBUG.
#ifndef NDEBUG
TEST(FetchedPlanDeathTest, ChecksTheContractOfPoliciesInDebugBuilds) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(planned({.shares = {{share(0, 1, 11)}}}), "shares_keep_the_contract");                 // too many
  EXPECT_DEATH(planned({.shares = {{share(0, 1, 0)}}}), "shares_keep_the_contract");                  // no tokens
  EXPECT_DEATH(planned({.shares = {{share(0, 0, 1)}}}), "shares_keep_the_contract");                  // at home
  EXPECT_DEATH(planned({.shares = {{share(0, 1, 1), share(0, 1, 1)}}}), "shares_keep_the_contract");  // twice
  EXPECT_DEATH(planned({.shares = {{share(0, 1, 1), share(1, 1, 1)}}, .guest_slots = 1}), "guest_slots");
}
#endif

}  // namespace
}  // namespace foremoe
