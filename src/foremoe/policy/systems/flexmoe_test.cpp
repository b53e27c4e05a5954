// Tests FlexMoE's rounds by hand, and the resulting plans.

#include "foremoe/policy/systems/flexmoe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/core/error.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::experts;
using test::result_of;
using testing::ElementsAre;
using testing::HasSubstr;

// Two ranks with three slots each: experts 0 1 2, and 2 3 0.
FlexMoePlacement two_ranks() {
  Array<ExpertId, 2> placement({2, 3});
  const int experts[2][3] = {{0, 1, 2}, {2, 3, 0}};
  for (int r = 0; r < 2; ++r) {
    for (int s = 0; s < 3; ++s) placement(r, s) = ExpertId{experts[r][s]};
  }
  return FlexMoePlacement(placement, 4);
}

std::vector<int> experts(const FlexMoePlacement& placement, int rank) {
  Array<ExpertId, 2> slots({2, 3}, kNoExpert);
  placement.write(slots);
  std::vector<int> ids;
  for (const ExpertId e : slots.row(rank)) ids.push_back(e.value);
  return ids;
}

const std::vector<std::int64_t> kLoad = {10, 60, 8, 12};

// Ranks serve 5 + 60 + 4 = 69 and 4 + 12 + 5 = 21. The experts' loads per replica are 5, 60, 4 and 12. Expert 1 gets
// the replica that expert 2 loses on rank 1. Ranks then serve 5 + 30 + 8 = 43 and 5 + 30 + 12 = 47, and the round is
// kept. Loads per replica are now 5, 30, 8 and 12. If expert 0 lost its replica on rank 0, ranks would serve 2/3·60 + 8
// = 48 and 20 + 12 + 10 = 42. Since 48 > 47 and 48 ÷ 42 > 47 ÷ 43, rounds end.
TEST(FlexMoe, MovesReplicasFromTheColdestToTheHottestWhileTheLargestLoadFalls) {
  FlexMoePlacement placement = two_ranks();
  EXPECT_THAT(placement.rank_loads(kLoad), ElementsAre(69, 21));
  flexmoe_adapt(placement, kLoad, {});
  EXPECT_THAT(experts(placement, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(experts(placement, 1), ElementsAre(0, 1, 3));
  EXPECT_THAT(placement.rank_loads(kLoad), ElementsAre(43, 47));

  EXPECT_TRUE(placement.move_replica(kLoad, false));
  EXPECT_THAT(placement.rank_loads(kLoad), ElementsAre(48, 42));
}

// Packed: expert 1 gains its replica on rank 0. Expert 0, with 5 tokens per replica, moves from there to expert 2's
// slot on rank 1. Loads are 60 + 8 and 10 + 12. Then expert 0 loses a replica on rank 1, and expert 2 moves there.
// Loads are 60 and 30. Only expert 1 has replicas left to lose.
TEST(FlexMoe, PacksReplicasOnOneRankLikeGalvatron) {
  FlexMoePlacement placement = two_ranks();
  EXPECT_TRUE(placement.move_replica(kLoad, true));
  EXPECT_THAT(placement.rank_loads(kLoad), ElementsAre(68, 22));
  flexmoe_adapt(placement, kLoad, {.packed = true});
  EXPECT_THAT(experts(placement, 0), ElementsAre(1, 1, 1));
  EXPECT_THAT(experts(placement, 1), ElementsAre(0, 2, 3));
  EXPECT_THAT(placement.rank_loads(kLoad), ElementsAre(60, 30));
  EXPECT_FALSE(placement.move_replica(kLoad, true));
}

// Expert 0 has the most tokens, but expert 1 has the most per replica (30 and 40) and gets expert 2's replica on rank
// 1. Loads change from 30 + 40 + 2 and 2 + 0 + 30 to 30 + 20 + 4 and 30 + 20 + 0.
TEST(FlexMoe, ReplicatesTheExpertWithTheMostTokensPerReplica) {
  FlexMoePlacement placement = two_ranks();
  const std::vector<std::int64_t> load = {60, 40, 4, 0};
  EXPECT_THAT(placement.rank_loads(load), ElementsAre(72, 32));
  EXPECT_TRUE(placement.move_replica(load, false));
  EXPECT_THAT(placement.rank_loads(load), ElementsAre(54, 50));
}

TEST(FlexMoe, MakesAtMostTheGivenRounds) {
  FlexMoePlacement placement = two_ranks();
  flexmoe_adapt(placement, kLoad, {.rounds = 0});
  EXPECT_THAT(placement.rank_loads(kLoad), ElementsAre(69, 21));
  flexmoe_adapt(placement, kLoad, {.rounds = 1, .packed = true});
  EXPECT_THAT(placement.rank_loads(kLoad), ElementsAre(68, 22));
}

TEST(FlexMoe, KeepsAReplicaOfEveryExpertAndNeverWidensTheLoadGap) {
  Random random(1);
  for (int i = 0; i < 50; ++i) {
    std::vector<std::int64_t> load(4);
    for (std::int64_t& tokens : load) tokens = static_cast<std::int64_t>(random.below(1000));
    for (const bool packed : {false, true}) {
      FlexMoePlacement placement = two_ranks();
      const std::vector<std::int64_t> before = placement.rank_loads(load);
      flexmoe_adapt(placement, load, {.packed = packed});
      const std::vector<std::int64_t> after = placement.rank_loads(load);
      EXPECT_LE(std::ranges::max(after) - std::ranges::min(after), std::ranges::max(before) - std::ranges::min(before));
      for (int e = 0; e < 4; ++e) EXPECT_GE(placement.num_replicas(e), 1);
    }
  }
}

StepPlan planned(const test::PolicyRun& run, const FlexMoeOptions& options = {}) {
  return test::plan_of(*make_flexmoe(options), run);
}

// Rank 1 has the highest load. Its tokens alternate between the two halves of its experts from micro-step to
// micro-step.
LoadTable skewed() {
  LoadTable load = test::random_load({.micro_steps = 6, .layers = 1, .ranks = 4, .experts = 16}, 3, 40);
  for (int m = 0; m < 6; ++m) {
    for (int r = 0; r < 4; ++r) {
      for (const int e : {4, 5}) load.load(m, 0, r, e + 2 * (m % 2)) += Tokens{100};
    }
  }
  return load;
}

TEST(FlexMoe, StartsWithHomesAndTheHomesOfTheNextRanks) {
  const LoadTable load = skewed();
  const StepPlan plan = planned({.load = load, .guest_slots = 5}, {.rounds = 0});
  EXPECT_EQ(plan.residency, Residency::kFree);
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(experts(plan, 0, 3), ElementsAre(12, 13, 14, 15, 0, 1, 2, 3, 4));
}

TEST(FlexMoe, PlansByPreviousMicroStepsOnly) {
  LoadTable load = skewed();
  const LoadTable former = load;
  const StepPlan before = planned({.load = load, .guest_slots = 2, .previous_load = &former});
  EXPECT_FALSE(std::ranges::equal(before.slot_expert.view()[0].flat(), before.slot_expert.view()[1].flat()));
  for (int r = 0; r < 4; ++r) std::ranges::reverse(load.load.row(5, 0, r));  // the last, which no micro-step follows
  EXPECT_EQ(before.slot_expert, planned({.load = load, .guest_slots = 2, .previous_load = &former}).slot_expert);
  for (int r = 0; r < 4; ++r) std::ranges::reverse(load.load.row(2, 0, r));
  EXPECT_NE(before.slot_expert, planned({.load = load, .guest_slots = 2, .previous_load = &former}).slot_expert);
}

TEST(FlexMoe, BalancesBetterWithTheMicroStepsOwnLoad) {
  const LoadTable load = skewed();
  const double followed = plan_figures(planned({.load = load, .guest_slots = 2}), load).rho.mean;
  const double oracle = plan_figures(planned({.load = load, .guest_slots = 2}, {.history = 0}), load).rho.mean;
  EXPECT_LT(oracle, followed);
}

TEST(FlexMoe, MovesAtMostTenReplicasAtATime) {
  const LoadTable load = test::random_load({.micro_steps = 6, .layers = 1, .ranks = 8, .experts = 64}, 3, 400);
  const StepPlan plan = planned({.load = load, .guest_slots = 8});
  for (int t = 1; t < plan.num_events(); ++t) {
    int copies = 0;
    for (int r = 0; r < 8; ++r) {
      const auto before = plan.slot_expert.row(t - 1, 0, r);
      for (const ExpertId e : plan.slot_expert.row(t, 0, r)) copies += std::ranges::count(before, e) == 0 ? 1 : 0;
    }
    EXPECT_LE(copies, 10);
  }
}

TEST(FlexMoe, StartsFromThePreviousPlan) {
  const LoadTable load = skewed();
  const StepPlan former = planned({.load = load, .guest_slots = 2});
  const StepPlan next = planned({.load = load, .guest_slots = 2, .previous = &former}, {.rounds = 0});
  const auto holds = [](const StepPlan& plan, int event, int rank) {
    std::vector<int> ids = experts(plan, event, rank);
    std::ranges::sort(ids);
    return ids;
  };
  for (int r = 0; r < 4; ++r) EXPECT_EQ(holds(next, 0, r), holds(former, 5, r));
}

TEST(FlexMoe, PlansTheFirstMicroStepByThePreviousLoad) {
  const LoadTable load = skewed();
  const LoadTable other = take_first(load, 1, 1);
  const StepPlan by_sum = planned({.load = load, .guest_slots = 2});
  const StepPlan by_history = planned({.load = load, .guest_slots = 2, .previous_load = &other});
  EXPECT_FALSE(std::ranges::equal(by_sum.slot_expert.view()[0].flat(), by_history.slot_expert.view()[0].flat()));
  const StepPlan oracle = planned({.load = load, .guest_slots = 2}, {.history = 0});
  EXPECT_TRUE(std::ranges::equal(oracle.slot_expert.view()[0].flat(), by_history.slot_expert.view()[0].flat()));
}

// The first micro-step is planned by the sum of the previous step's last five, in any order.
TEST(FlexMoe, SumsTheLastFiveMicroStepsAcrossSteps) {
  const LoadTable load = test::random_load({.micro_steps = 5, .layers = 1, .ranks = 4, .experts = 16}, 3, 400);
  const auto planned_after = [&](const LoadTable& former) {
    return planned({.load = load, .guest_slots = 2, .previous_load = &former});
  };
  LoadTable former = test::random_load({.micro_steps = 7, .layers = 1, .ranks = 4, .experts = 16}, 4, 400);
  const StepPlan plan = planned_after(former);
  LoadTable older = former;  // the first two of seven do not count, the third does
  std::ranges::reverse(older.load.row(1, 0, 0));
  EXPECT_EQ(planned_after(older).slot_expert, plan.slot_expert);
  LoadTable in_other_order = former;
  std::ranges::swap_ranges(in_other_order.load.row(2, 0, 0), in_other_order.load.row(6, 0, 0));
  EXPECT_TRUE(std::ranges::equal(planned_after(in_other_order).slot_expert.view()[0].flat(),
                                 plan.slot_expert.view()[0].flat()));
  for (int r = 0; r < 4; ++r) std::ranges::fill(former.load.row(2, 0, r), Tokens{r == 0 ? 9000 : 1});
  for (int e = 0; e < 12; ++e) former.load(2, 0, 0, e) = Tokens{1};
  EXPECT_FALSE(
      std::ranges::equal(planned_after(former).slot_expert.view()[0].flat(), plan.slot_expert.view()[0].flat()));
}

// Two nodes of two ranks, and four experts at home on ranks 0 to 3. Rank r has expert r + 1 in its guest slot, so
// expert 2 has a replica in each node, on ranks 1 and 2. Rank 0 sends expert 2 12 tokens.
TEST(FlexMoe, RoutesTokensInsideTheirNodeFirst) {
  LoadTable load = test::random_load({.micro_steps = 1, .layers = 1, .ranks = 4, .experts = 4}, 3, 1);
  load.ranks_per_node = 2;
  for (int r = 0; r < 4; ++r) std::ranges::fill(load.load.row(0, 0, r), Tokens{0});
  load.load(0, 0, 0, 2) = Tokens{12};
  const auto served = [&](const FlexMoeOptions& options) {
    const StepPlan plan = planned({.load = load, .guest_slots = 1}, options);
    std::vector<std::int64_t> of_rank;
    for (int r = 0; r < 4; ++r) {
      std::int64_t sum = 0;
      for (const Tokens tokens : plan.slot_tokens.row(0, 0, r)) sum += tokens.value;
      of_rank.push_back(sum);
    }
    return of_rank;
  };
  EXPECT_THAT(served({.rounds = 0}), ElementsAre(0, 12, 0, 0));
  EXPECT_THAT(served({.rounds = 0, .inside_first = false}), ElementsAre(0, 6, 6, 0));
}

TEST(FlexMoe, ReportsUnsupportedInput) {
  const LoadTable load = skewed();
  EXPECT_THAT(std::get<Skipped>(result_of(*make_flexmoe(), {.load = load, .guest_slots = 2, .in_flight = 2})).reason,
              HasSubstr("one micro-step in flight"));
  const LoadTable other = test::random_load({.layers = 2}, 1);
  EXPECT_THROW(result_of(*make_flexmoe(), {.load = load, .guest_slots = 2, .previous_load = &other}), InputError);
}

TEST(FlexMoe, PlansTables) {
  for (const char* table : {"q30-ep16", "v3-ep64-skewed"}) {
    const std::string path = std::string("data/load-") + table + ".safetensors";
    const LoadTable load = take_first(read_load(path), 6, 1);
    for (const bool packed : {false, true}) planned({.load = load, .guest_slots = 2}, {.packed = packed});
  }
}

}  // namespace
}  // namespace foremoe
