#include "foremoe/policy/placed_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

// Two ranks, four experts, one layer. Only rank 0 has tokens.
LoadTable load_of(const std::vector<std::vector<int>>& expert_loads) {
  LoadTable table;
  table.load = Array<Tokens, 4>({expert_loads.size(), 1, 2, 4});
  for (std::size_t m = 0; m < expert_loads.size(); ++m) {
    for (std::size_t e = 0; e < 4; ++e) table.load(m, 0, 0, e) = Tokens{expert_loads[m][e]};
  }
  return table;
}

struct Request {
  LoadTable load = load_of({{10, 7, 20, 3}});
  std::vector<std::vector<std::vector<int>>> placements;  // [placement][rank][slot]
  Split split = Split::kEqual;
  int guest_slots = 1;
  int in_flight = 1;
  Residency residency = Residency::kFree;
  std::function<SplitTokens(LayerId)> own_split = {};
};

PolicyResult plan(const Request& request) {
  ThreadPool pool(1);
  const Array<RankId, 2> home = contiguous_homes(1, 4, 2);
  const auto place = [&](LayerId, ArrayView<const std::int64_t, 2>) {
    Array<ExpertId, 3> slots({request.placements.size(), 2, request.placements.front().front().size()});
    for (std::size_t p = 0; p < request.placements.size(); ++p) {
      for (std::size_t r = 0; r < 2; ++r) {
        std::ranges::transform(request.placements[p][r], slots.row(p, r).begin(), [](int e) { return ExpertId{e}; });
      }
    }
    return slots;
  };
  return plan_freely({.name = "test",
                      .split = request.split,
                      .place = place,
                      .own_split = request.own_split,
                      .residency = request.residency},
                     {.load = request.load,
                      .home = home,
                      .options = {.guest_slots = request.guest_slots, .in_flight = request.in_flight}},
                     pool);
}

StepPlan planned(const Request& request) {
  StepPlan step = std::get<PlannedStep>(plan(request)).plan;
  const CheckReport report = check_plan(step, request.load);
  EXPECT_TRUE(report.ok()) << report.violations.front().message;
  return step;
}

TEST(FreePlan, KeepsHomesInTheirSlotsAtTheFirstEvent) {
  const StepPlan plan = planned({.placements = {{{2, 1, 0}, {3, 0, 2}}}});
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(2, 3, 0));
}

TEST(FreePlan, KeepsTheSlotOfAnExpertThatStaysAndFillsFreeSlotsAscending) {
  const StepPlan plan =
      planned({.load = load_of({{1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}}),
               .placements = {{{0, 1, 2}, {3, 2, 1}}, {{3, 2, 0}, {1, 0, 2}}, {{1, 2, 3}, {0, 1, 2}}}});
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(experts(plan, 1, 0), ElementsAre(0, 3, 2));
  EXPECT_THAT(experts(plan, 2, 0), ElementsAre(1, 3, 2));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(2, 3, 1));
  EXPECT_THAT(experts(plan, 1, 1), ElementsAre(2, 0, 1));
  EXPECT_THAT(experts(plan, 2, 1), ElementsAre(2, 0, 1));
}

TEST(FreePlan, MergesReplicasOfAnExpertOnOneRankAndAddsTheirParts) {
  const StepPlan plan = planned({.placements = {{{2, 1, 2}, {3, 0, 2}}}});
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(2, 1, _));
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(14, 7, 0));  // 20 tokens in parts of 7, 7 and 6
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(6, 3, 10));
  EXPECT_EQ(plan.max_load(0, 0), Tokens{21});
  EXPECT_EQ(plan.lower_bound(0, 0), Tokens{20});
}

TEST(FreePlan, GivesTheRemainderOfAnEqualSplitToTheLowestRanks) {
  const StepPlan plan = planned({.placements = {{{0, 1, 3}, {2, 1, 3}}}});
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(10, 4, 2));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(20, 1, 3));  // experts 2, 3, 1
}

TEST(FreePlan, MinimisesTheLargestLoadWithAnExactSplit) {
  Request request{.load = load_of({{11, 0, 20, 0}}), .placements = {{{0, 1, 2}, {2, 3, _}}}};
  EXPECT_EQ(planned(request).max_load(0, 0), Tokens{21});
  request.split = Split::kExact;
  EXPECT_EQ(planned(request).max_load(0, 0), Tokens{16});
}

TEST(FreePlan, KeepsASinglePlacementForTheWholeStep) {
  const StepPlan plan =
      planned({.load = load_of({{4, 0, 0, 0}, {0, 0, 0, 9}}), .placements = {{{0, 1, 3}, {2, 3, 0}}}});
  EXPECT_EQ(experts(plan, 0, 0), experts(plan, 1, 0));
  EXPECT_EQ(experts(plan, 0, 1), experts(plan, 1, 1));
  EXPECT_THAT(tokens(plan, 1, 0), ElementsAre(0, 0, 5));
}

TEST(FreePlan, IsResidentIfHomesStayAndGuestsNeverChange) {
  const StepPlan plan = planned({.load = load_of({{4, 0, 0, 0}, {0, 0, 0, 9}, {3, 3, 3, 3}}),
                                 .placements = {{{3, 0, 1}, {2, 0, 3}}},
                                 .in_flight = 2,
                                 .residency = Residency::kResident});
  EXPECT_EQ(plan.residency, Residency::kResident);
  ASSERT_EQ(plan.num_events(), 6);  // F0 F1 B0 F2 B1 B2
  for (int t = 0; t < 6; ++t) {
    EXPECT_THAT(experts(plan, t, 0), ElementsAre(0, 1, 3));
    EXPECT_THAT(experts(plan, t, 1), ElementsAre(2, 3, 0));
  }
  EXPECT_EQ(tokens(plan, 2, 0), tokens(plan, 0, 0));
  EXPECT_THAT(tokens(plan, 4, 0), ElementsAre(0, 0, 5));
}

TEST(FreePlan, UsesThePolicysOwnSplit) {
  std::vector<int> asked;
  const StepPlan plan = planned({.load = load_of({{5, 0, 0, 0}, {6, 0, 0, 0}}),
                                 .placements = {{{0, 1, 3}, {2, 3, 0}}},
                                 .own_split = [&](LayerId) {
                                   return [&](MicroStepId m, const planner::ReplicaGraph& graph,
                                              std::span<const std::int64_t> load, planner::Assignment& a) {
                                     asked.push_back(m.value);
                                     a.quota.assign(graph.num_slots(), 0);
                                     a.rank_load = {0, load[0]};
                                     a.quota[graph.find(0, 1)] = load[0];
                                   };
                                 }});
  EXPECT_THAT(asked, ElementsAre(0, 1));
  EXPECT_THAT(tokens(plan, 1, 0), ElementsAre(0, 0, 0));
  EXPECT_THAT(tokens(plan, 1, 1), ElementsAre(0, 0, 6));
}

TEST(FreePlan, IsSkippedWithBackwardEvents) {
  const PolicyResult result = plan({.placements = {{{0, 1, 3}, {2, 3, 0}}}, .in_flight = 2});
  ASSERT_TRUE(std::holds_alternative<Skipped>(result));
  EXPECT_THAT(std::get<Skipped>(result).reason, HasSubstr("one micro-step in flight"));
}

TEST(FreePlan, IsSkippedIfRanksDoNotDivideExperts) {
  ThreadPool pool(1);
  const LoadTable load = test::random_load({.ranks = 3, .experts = 8}, 1);
  const Array<RankId, 2> home({2, 8});
  const PolicyResult result = plan_freely({.name = "test"}, {.load = load, .home = home, .options = {}}, pool);
  ASSERT_TRUE(std::holds_alternative<Skipped>(result));
  EXPECT_EQ(std::get<Skipped>(result).reason, "8 experts and 1 guest slots on each of 3 ranks cannot be placed evenly");
}

TEST(FreePlan, NamesTheInvalidOption) {
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message([] {
                plan({.placements = {{{0, 1}, {2, 3}}}, .guest_slots = -1});
              }),
              HasSubstr("guest_slots: -1 is not in 0 … 65536"));
  EXPECT_THAT(message([] {
                plan({.placements = {{{0, 1}, {2, 3}}}, .in_flight = 0});
              }),
              HasSubstr("in_flight: 0 is less than 1"));
  ThreadPool pool(1);
  const LoadTable load = test::random_load({}, 1);
  const Array<RankId, 2> home({1, 8});
  EXPECT_THAT(message([&] { plan_freely({.name = "test"}, {.load = load, .home = home, .options = {}}, pool); }),
              HasSubstr("homes: has "));
}

}  // namespace
}  // namespace foremoe
