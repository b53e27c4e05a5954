#include "foremoe/plan/plan_figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "foremoe/plan/plan_json.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

// Two nodes of one rank, experts 0 and 1 at home on ranks 0 and 1, one guest slot, one layer, three micro-steps. In the
// first micro-step, rank 1 has a guest of expert 0 and the load is balanced. The last micro-step has no load.
struct WorkedExample {
  LoadTable load{.load = Array<Tokens, 4>({3, 1, 2, 2}), .ranks_per_node = 1};
  StepPlan plan;

  WorkedExample() {
    set_load(0, 0, {10, 0});
    set_load(0, 1, {6, 4});
    set_load(1, 0, {2, 5});
    set_load(1, 1, {1, 3});
    plan = test::random_plan(load, {.guest_slots = 0}, 1);
    plan.guest_slots = 1;
    plan.slot_expert = Array<ExpertId, 4>({3, 1, 2, 2}, kNoExpert);
    plan.slot_tokens = Array<Tokens, 4>({3, 1, 2, 2});
    for (int t = 0; t < 3; ++t) {
      set_slot(t, 0, 0, 0, 0);
      set_slot(t, 1, 0, 1, 0);
    }
    set_slot(0, 0, 0, 0, 10);
    set_slot(0, 1, 0, 1, 4);
    set_slot(0, 1, 1, 0, 6);
    set_slot(1, 0, 0, 0, 3);
    set_slot(1, 1, 0, 1, 8);
  }
  void set_load(int m, int source, std::array<int, 2> tokens) {
    for (int e = 0; e < 2; ++e) load.load(m, 0, source, e) = Tokens{tokens[e]};
  }
  void set_slot(int t, int r, int s, int expert, int quota) {
    plan.slot_expert(t, 0, r, s) = ExpertId{expert};
    plan.slot_tokens(t, 0, r, s) = Tokens{quota};
  }
};

TEST(PlanFigures, AreCancelledWithThePool) {
  const WorkedExample example;
  ThreadPool pool(1);
  EXPECT_EQ(plan_figures(example.plan, example.load, {.pool = &pool}).events, 3);
  pool.cancel();
  EXPECT_THROW(plan_figures(example.plan, example.load, {.pool = &pool}), Cancelled);
}

TEST(PlanFigures, MatchAnExampleComputedByHand) {
  const WorkedExample example;
  const PlanFigures figures = plan_figures(example.plan, example.load, {.align = 4});
  EXPECT_EQ(figures.events, 3);
  EXPECT_EQ(figures.micro_steps, 3);
  EXPECT_DOUBLE_EQ(figures.max_vio, (6 / 10.0 + 2.5 / 5.5) / 2);  // experts have 16 and 4 tokens, then 3 and 8
  EXPECT_DOUBLE_EQ(figures.avg_vio, figures.max_vio);
  EXPECT_DOUBLE_EQ(figures.rho.mean, (1 + 16.0 / 11) / 2);
  EXPECT_DOUBLE_EQ(figures.rho.p99, 1 + 0.99 * (16.0 / 11 - 1));
  EXPECT_DOUBLE_EQ(figures.rho.max, 16.0 / 11);
  EXPECT_DOUBLE_EQ(figures.rho_lower_bound_mean, (1 + 6 / 5.5) / 2);
  EXPECT_DOUBLE_EQ(figures.rho_padded.mean, (12 / 10.0 + 8 / 5.5) / 2);
  EXPECT_DOUBLE_EQ(figures.rho_padded.max, 8 / 5.5);
  EXPECT_EQ(figures.max_rank_tokens, 10);
  EXPECT_EQ(figures.copies, 1);
  EXPECT_DOUBLE_EQ(figures.copies_per_layer_event, 1 / 3.0);
  EXPECT_EQ(figures.copies_max_per_rank, 1);
  EXPECT_EQ(figures.home_moves, 0);
  EXPECT_DOUBLE_EQ(figures.guests_per_layer, 1 / 3.0);
  EXPECT_DOUBLE_EQ(figures.node_link_tokens.mean, 2.5);  // 0, then the 5 tokens that node 0 sends to expert 1
  EXPECT_DOUBLE_EQ(figures.node_link_tokens.max, 5);
  EXPECT_FALSE(figures.node_link_rows);
}

TEST(PlanFigures, LinkFiguresAreZeroOnOneNode) {
  WorkedExample example;
  example.plan.ranks_per_node = 2;
  EXPECT_EQ(plan_figures(example.plan, example.load).node_link_tokens.max, 0);
}

TEST(PlanFigures, IncludeNodesThatOnlyReceive) {
  // Three nodes of one rank. Ranks 1 and 2 send all their rows to the expert at home on rank 0.
  LoadTable load{.load = Array<Tokens, 4>({1, 1, 3, 3}), .ranks_per_node = 1};
  load.load(0, 0, 1, 0) = Tokens{4};
  load.load(0, 0, 2, 0) = Tokens{3};
  const StepPlan plan = test::random_plan(load, {.guest_slots = 0}, 1);
  EXPECT_EQ(plan_figures(plan, load).node_link_tokens.max, 7);
}

TEST(PlanFigures, CountHomeMovesFromTheGivenHomes) {
  const WorkedExample example;
  Array<RankId, 2> swapped({1, 2});
  swapped(0, 0) = RankId{1};
  EXPECT_EQ(plan_figures(example.plan, example.load, {.initial_home = swapped}).home_moves, 2);
}

TEST(PlanFigures, ArePerfectlyBalancedWithoutLoad) {
  const LoadTable load = test::random_load({}, 1, 0);
  const PlanFigures figures = plan_figures(test::random_plan(load, {}, 1), load);
  EXPECT_EQ(figures.rho.mean, 1);
  EXPECT_EQ(figures.rho.max, 1);
  EXPECT_EQ(figures.node_link_tokens.max, 0);
}

TEST(PlanFigures, CountAMicroStepWithTwoEventsOnce) {
  const LoadTable load = test::random_load({.micro_steps = 5}, 3);
  const PlanFigures one = plan_figures(test::random_plan(load, {.guest_slots = 0}, 1), load);
  const PlanFigures two = plan_figures(test::random_plan(load, {.guest_slots = 0, .in_flight = 2}, 1), load);
  EXPECT_EQ(two.events, 2 * one.events);
  EXPECT_EQ(two.rho.mean, one.rho.mean);
  EXPECT_EQ(two.rho.p99, one.rho.p99);
  EXPECT_EQ(two.node_link_tokens.mean, one.node_link_tokens.mean);
}

TEST(PlanFigures, CountRowsOncePerTokenAndNode) {
  const std::vector<std::uint8_t> routes{0, 1, 2, 3};  // one token for each of the two nodes
  RoutingTrace shape{.num_layers = 1, .top_k = 2, .num_experts = 4, .cu_seqlens = {0, 2}};
  const BatchedTrace tokens{.trace = test::trace_of(routes, shape),
                            .batching = {.num_micro_steps = 1,
                                         .num_ranks = 4,
                                         .ranks_per_node = 2,
                                         .micro_step = {MicroStepId{0}},
                                         .rank = {RankId{0}}}};
  const LoadTable load = test::load_of(tokens.trace, tokens.batching);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 0}, 1);
  const PlanFigures figures = plan_figures(plan, load, {.tokens = &tokens});
  EXPECT_EQ(figures.node_link_tokens.max, 2);
  ASSERT_TRUE(figures.node_link_rows);
  EXPECT_EQ(figures.node_link_rows->max, 1);
}

TEST(PlanFigures, HaveTheDocumentedJsonKeys) {
  const WorkedExample example;
  const nlohmann::ordered_json json = to_json(plan_figures(example.plan, example.load));
  for (const char* key :
       {"policy", "events", "micro_steps", "layers", "ranks", "experts", "guest_slots", "residency", "in_flight", "rho",
        "rho_lower_bound", "rho_padded", "max_rank_tokens", "copies_per_layer_event", "copies_max_per_rank",
        "home_moves", "guests_per_layer", "node_link_tokens"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_FALSE(json.contains("node_link_rows"));
  EXPECT_EQ(json["residency"], "resident");
  EXPECT_DOUBLE_EQ(json["rho"]["max"], 16.0 / 11);
  EXPECT_DOUBLE_EQ(json["node_link_tokens"]["mean"], 2.5);
}

using testing::ElementsAre;
using testing::IsEmpty;

TEST(Copies, AreExpertsThatTheRankDidNotHoldBefore) {
  WorkedExample example;
  example.set_slot(1, 1, 1, 0, 0);  // the guest stays in the second micro-step and is gone in the third
  CopyFinder copies(example.plan, LayerId{0});
  EXPECT_THAT(copies.into(EventId{0}, RankId{0}), IsEmpty());  // homes are present before the first event
  EXPECT_THAT(copies.into(EventId{0}, RankId{1}), ElementsAre(Copy{ExpertId{0}, SlotId{1}}));
  EXPECT_THAT(copies.into(EventId{1}, RankId{1}), IsEmpty());
  EXPECT_THAT(copies.into(EventId{2}, RankId{1}), IsEmpty());
}

TEST(Copies, AreAllGuestsWithQuotaUnderShared) {
  WorkedExample example;
  example.plan.residency = Residency::kShared;
  example.set_slot(1, 1, 1, 0, 1);
  example.set_slot(2, 1, 1, 0, 0);
  CopyFinder copies(example.plan, LayerId{0});
  EXPECT_THAT(copies.into(EventId{1}, RankId{1}), ElementsAre(Copy{ExpertId{0}, SlotId{1}}));
  EXPECT_THAT(copies.into(EventId{2}, RankId{1}), IsEmpty());
}

}  // namespace
}  // namespace foremoe
