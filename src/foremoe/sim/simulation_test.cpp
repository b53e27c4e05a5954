#include "foremoe/sim/simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/testing/simulated_steps.h"

namespace foremoe {
namespace {

using sim_test::homes_plan;
using sim_test::imbalanced_load;
using sim_test::kNear;
using sim_test::one_layer;
using sim_test::OneCopy;
using sim_test::round_cluster;
using sim_test::round_cost;
using sim_test::round_model;
using sim_test::round_options;
using sim_test::Simulated;

TEST(SimulationTest, EachPartOfAForwardTakesTheTimeOfItsSlowestRank) {
  const LoadTable load = imbalanced_load();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulatedPhase phase = Simulated{load, plan, cost}.phase(Phase::kRecompute);

  const Tokens most{100};  // tokens of rank 0
  EXPECT_NEAR(phase.parts.dense, cost.dense(most, Pass::kForward) + cost.other_layers(most, Pass::kForward), kNear);
  // Rank 0 sends 40 rows and receives 30, rank 1 vice versa: 40 rows · 20 bytes ÷ 8000 bytes/s = 0.1 s.
  EXPECT_NEAR(phase.parts.dispatch, 0.1, kNear);
  EXPECT_NEAR(phase.parts.combine, 0.1, kNear);
  // Rank 0 computes 90 rows, rank 1 50: 90 · 600 ÷ 60,000 = 0.9 s.
  EXPECT_NEAR(phase.parts.experts, 0.9, kNear);
  EXPECT_EQ(phase.parts.exposed_copies, 0);
  EXPECT_EQ(phase.parts.exposed_gradients, 0);
  EXPECT_EQ(phase.parts.arena_refresh, 0);
  EXPECT_EQ(phase.parts.optimizer, 0);
  EXPECT_NEAR(phase.seconds, phase.parts.dense + 1.1, kNear);
  EXPECT_EQ(phase.peak_tokens, Tokens{90});
  // Mean rank: 70 rows in 0.7 s; it sends and receives (40 + 30) / 2 = 35 rows, 0.0875 s.
  EXPECT_NEAR(phase.ideal_seconds, phase.parts.dense + 0.7 + 2 * 0.0875, kNear);
  EXPECT_NEAR(phase.mean_expert_seconds, 0.7, kNear);
  EXPECT_NEAR(phase.ideal_exchange_seconds, 2 * 0.0875, kNear);
}

TEST(SimulationTest, APolicyUpdateHasAForwardABackwardAndTheOptimizer) {
  const LoadTable load = imbalanced_load();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulatedPhase phase = Simulated{load, plan, cost}.phase(Phase::kPolicyUpdate);

  const Tokens most{100};
  double dense = 0;
  for (const Pass direction : {Pass::kForward, Pass::kBackward}) {
    dense += cost.dense(most, direction) + cost.other_layers(most, direction);
  }
  EXPECT_NEAR(phase.parts.dense, dense, kNear);
  // Forward, recomputed forward and backward each dispatch and combine once.
  EXPECT_NEAR(phase.parts.dispatch, 0.3, kNear);
  EXPECT_NEAR(phase.parts.combine, 0.3, kNear);
  // A backward has twice the products and first recomputes the forward: 0.9 + 3 · 0.9 s.
  EXPECT_NEAR(phase.parts.experts, 3.6, kNear);
  EXPECT_NEAR(phase.mean_expert_seconds, 2.8, kNear);
  EXPECT_NEAR(phase.ideal_exchange_seconds, 6 * 0.0875, kNear);
  EXPECT_NEAR(phase.parts.optimizer, cost.optimizer(1), kNear);
  EXPECT_NEAR(phase.seconds, phase.parts.sum(), kNear);
}

TEST(SimulationTest, APerfectlyBalancedStepIsIdeal) {
  const LoadTable load = one_layer({{{25, 25}, {25, 25}}, {{10, 10}, {10, 10}}});
  const StepPlan plan = homes_plan(load, 0);
  for (const Phase kind : {Phase::kRecompute, Phase::kPolicyUpdate}) {
    const SimulatedPhase phase = Simulated{load, plan, round_cost(1, 2)}.phase(kind);
    EXPECT_NEAR(phase.seconds, phase.ideal_seconds, kNear * phase.seconds);
  }
}

TEST(SimulationTest, ACopyLongerThanItsWindowIsExposedByTheExcess) {
  const OneCopy step;
  const SimulationOptions one_ahead{.path = PathChoice::kPeer, .depth = 1};
  CostModel cost = round_cost(1, 2);
  // No rows are exchanged. The copy may run from the start of micro-step 0 to that of micro-step 1's experts.
  const SimulatedPhase hidden = Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, one_ahead);
  ASSERT_EQ(hidden.copies, 1);
  EXPECT_EQ(hidden.parts.exposed_copies, 0);
  EXPECT_EQ(hidden.parts.dispatch, 0);
  const double window = hidden.parts.dense + 0.5;  // attention of both micro-steps and experts of the first: 50 rows

  Cluster slow = round_cluster();
  slow.peers.bytes_per_second = 600 / (1.5 * window);
  const SimulatedPhase phase =
      Simulated{step.load, step.plan, {slow, cost.model(), cost.options()}}.phase(Phase::kRecompute, one_ahead);
  EXPECT_NEAR(phase.parts.exposed_copies, 0.5 * window, kNear);
  EXPECT_NEAR(phase.seconds, 1.5 * window + 0.5, kNear);
}

TEST(SimulationTest, AGuestsGradientIsSentHomeAndExposedAtTheEnd) {
  const OneCopy step;
  const CostModel cost = round_cost(1, 2);
  const SimulationOptions peers{.path = PathChoice::kPeer};
  const SimulatedPhase phase = Simulated{step.load, step.plan, cost}.phase(Phase::kPolicyUpdate, peers);
  // Gradients of 300 parameters in float32 are 1200 bytes, 0.15 s. They are sent after the experts of the last
  // backward; only the attention of that backward hides them.
  const double hidden = cost.dense(Tokens{50}, Pass::kBackward) + cost.other_layers(Tokens{50}, Pass::kBackward);
  EXPECT_NEAR(phase.parts.exposed_gradients, std::max(0.0, 0.15 - hidden), kNear);
  EXPECT_EQ(phase.traffic[0].link, "peers");
  EXPECT_EQ(phase.traffic[0].copies, Bytes{600});
  EXPECT_EQ(phase.traffic[0].gradients, Bytes{1200});
  EXPECT_EQ(phase.traffic[0].rows, Bytes{0});
}

TEST(SimulationTest, AnArenaIsFilledBeforeThePhase) {
  const OneCopy step;
  const CostModel cost = round_cost(1, 2);
  const SimulatedPhase phase =
      Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, {.path = PathChoice::kHost});
  EXPECT_NEAR(phase.parts.arena_refresh, 600.0 / 8000, kNear);  // expert 1, over rank 1's link to the host
  EXPECT_EQ(phase.arena, Bytes{600});
}

TEST(SimulationTest, LayersRepresentTheModelsLayers) {
  const OneCopy step;
  const CostModel one = round_cost(1, 2);
  const CostModel three = round_cost(3, 2);
  Cluster slow = round_cluster();
  slow.peers.bytes_per_second = 200;
  const SimulationOptions peers{.path = PathChoice::kPeer};
  const SimulatedPhase of_one =
      Simulated{step.load, step.plan, {slow, one.model(), one.options()}}.phase(Phase::kRecompute, peers);
  const SimulatedPhase of_three =
      Simulated{step.load, step.plan, {slow, three.model(), three.options()}}.phase(Phase::kRecompute, peers);
  EXPECT_NEAR(of_three.parts.experts, 3 * of_one.parts.experts, kNear);
  EXPECT_EQ(of_three.traffic[0].copies, Bytes{3 * 600});
  EXPECT_EQ(of_three.memory.guest_weights, Bytes{3 * 600});
  const double once = 2 * one.other_layers(Tokens{50}, Pass::kForward);  // for two micro-steps
  EXPECT_NEAR(of_three.parts.dense - once, 3 * (of_one.parts.dense - once), kNear);
}

TEST(SimulationTest, MicroStepsInFlightKeepTheirActivations) {
  const LoadTable load = one_layer({{{50, 0}, {0, 50}}, {{50, 0}, {0, 50}}, {{50, 0}, {0, 50}}});
  const CostModel cost = round_cost(1, 2);
  const StepPlan one = homes_plan(load, 0);
  const StepPlan two = homes_plan(load, 0, Residency::kResident, 2);
  const Bytes of_one = Simulated{load, one, cost}.phase(Phase::kPolicyUpdate).memory.activations;
  const Bytes of_two = Simulated{load, two, cost}.phase(Phase::kPolicyUpdate).memory.activations;
  EXPECT_EQ(of_two.value - of_one.value, 50 * cost.activations_per_token().value);
}

TEST(SimulationTest, AFreePlanIsSimulatedInThePolicyUpdateToo) {
  OneCopy step;
  step.plan.residency = Residency::kFree;
  const CostModel cost = round_cost(1, 2);
  const SimulatedPhase recompute = Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute);
  const SimulatedPhase update = Simulated{step.load, step.plan, cost}.phase(Phase::kPolicyUpdate);
  EXPECT_EQ(recompute.copies, 1);
  EXPECT_EQ(update.copies, 1);
  EXPECT_EQ(update.traffic[0].gradients, Bytes{1200});
  EXPECT_NEAR(update.parts.experts, 4 * recompute.parts.experts, kNear);
}

TEST(SimulationTest, APolicyUpdateBeginsWithRecomputesLastFreePlacement) {
  const LoadTable load = one_layer({{{50, 0}, {0, 50}}, {{50, 0}, {0, 50}}});
  StepPlan plan = homes_plan(load, 0, Residency::kFree);
  const CostModel cost = round_cost(1, 2);
  const auto copies = [&] {
    const SimulationInput input{.load = load, .plan = plan, .cost = cost};
    const SimulatedStep step = simulate_step(input, nullptr, {});
    EXPECT_EQ(step.policy_update.traffic[0].gradients, Bytes{2 * 1200}) << "two experts are away from home";
    return std::pair(step.recompute.copies, step.policy_update.copies);
  };
  const auto exchange_ranks = [&](int event) {
    std::swap(plan.slot_expert(event, 0, 0, 0), plan.slot_expert(event, 0, 1, 0));
    std::swap(plan.slot_tokens(event, 0, 0, 0), plan.slot_tokens(event, 0, 1, 0));
  };
  exchange_ranks(1);  // two copies. The update begins with homes and needs two more
  EXPECT_EQ(copies(), std::pair(2L, 4L));
  exchange_ranks(0);  // exchanged from the first event on, so both are already in place for the update
  EXPECT_EQ(copies(), std::pair(2L, 0L));
  // A policy update without recompute begins with all experts at home.
  EXPECT_EQ((Simulated{load, plan, cost}.phase(Phase::kPolicyUpdate).copies), 2);
}

TEST(SimulationTest, FreePlansCountStagingBuffersForPeerCopies) {
  OneCopy step;  // one guest slot in one layer
  step.plan.residency = Residency::kFree;
  const CostModel cost = round_cost(1, 2);
  const auto experts = [&](PathChoice path) {
    const SimulatedPhase phase = Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, {.path = path});
    return phase.memory.guest_weights.value / cost.expert_weights().value;
  };
  EXPECT_EQ(experts(PathChoice::kHost), 1);
  EXPECT_EQ(experts(PathChoice::kPeer), 1 + 3) << "three sets of one buffer";
}

TEST(SimulationTest, FreePlansCountGradientsInHomeSlotsToo) {
  const LoadTable load = one_layer({{{50, 0}, {0, 50}}, {{50, 0}, {0, 50}}});
  StepPlan plan = homes_plan(load, 1, Residency::kFree);
  std::swap(plan.slot_expert(1, 0, 0, 0), plan.slot_expert(1, 0, 1, 0));
  std::swap(plan.slot_tokens(1, 0, 0, 0), plan.slot_tokens(1, 0, 1, 0));
  const CostModel cost = round_cost(1, 2);
  const RankMemory memory = Simulated{load, plan, cost}.phase(Phase::kPolicyUpdate, {.path = PathChoice::kHost}).memory;
  EXPECT_EQ(memory.guest_gradients, cost.expert_gradient());
  EXPECT_EQ(memory.guest_weights, Bytes{0}) << "no guest slot is filled";
}

TEST(SimulationTest, RecordedTokensDetermineTheTimeOfDenseLayersWhetherRowsAreShortOrNot) {
  LoadTable load = imbalanced_load();  // 140 rows of 210 tokens
  load.tokens = Array<Tokens, 2>({1, 2});
  load.tokens(0, 0) = Tokens{150};
  load.tokens(0, 1) = Tokens{60};
  const StepPlan plan = homes_plan(load, 0);
  CostOptions options = round_options();
  options.dispatch = Dispatch::kToken;
  const CostModel cost(round_cluster(), round_model(1, 2), options);
  const double dense = cost.dense(Tokens{150}, Pass::kForward) + cost.other_layers(Tokens{150}, Pass::kForward);
  std::vector<double> seconds;
  for (const std::int64_t missing : {70, 69}) {  // 69: one row has a route, but no expert
    load.missing_rows = missing;
    const SimulatedPhase phase = Simulated{load, plan, cost}.phase(Phase::kRecompute);
    EXPECT_NEAR(phase.parts.dense, dense, kNear);
    seconds.push_back(phase.seconds);
  }
  EXPECT_EQ(seconds[0], seconds[1]);
}

TEST(SimulationTest, ARepeatedLoadEqualsItsConcatenation) {
  const LoadTable once = one_layer({{{60, 40}, {30, 10}}, {{20, 30}, {0, 50}}});
  const LoadTable twice =
      one_layer({{{60, 40}, {30, 10}}, {{20, 30}, {0, 50}}, {{60, 40}, {30, 10}}, {{20, 30}, {0, 50}}});
  const StepPlan plan = homes_plan(twice, 0);
  for (const Dispatch dispatch : {Dispatch::kRow, Dispatch::kToken}) {
    CostOptions options = round_options();
    options.dispatch = dispatch;
    const CostModel cost(round_cluster(), round_model(1, 2), options);
    const SimulatedPhase repeated = simulate_phase({.load = once, .plan = plan, .cost = cost, .repeat_load = true},
                                                   {.phase = Phase::kPolicyUpdate});
    EXPECT_EQ(repeated.seconds, (Simulated{twice, plan, cost}.phase(Phase::kPolicyUpdate).seconds));
  }
}

TEST(SimulationTest, AStepIsTheSumOfItsPhasesAndHomeMoves) {
  const LoadTable load = imbalanced_load();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulationInput input{.load = load, .plan = plan, .cost = cost};
  const SimulatedStep step = simulate_step(input, nullptr, {.home_moves = 2, .rollout_seconds = 7});
  const Simulated alone{load, plan, cost};
  EXPECT_EQ(step.recompute.seconds, alone.phase(Phase::kRecompute).seconds);
  EXPECT_EQ(step.policy_update.seconds, alone.phase(Phase::kPolicyUpdate).seconds);
  // Each of two ranks sends one expert: 300 parameters, 2 bytes of weights and 12 of optimizer, over 8000 bytes/s.
  EXPECT_NEAR(step.home_move_seconds, 300.0 * 14 / 8000, kNear);
  EXPECT_NEAR(step.step_seconds, step.recompute.seconds + step.policy_update.seconds + step.home_move_seconds, kNear);
  EXPECT_NEAR(step.rl_step_seconds, step.step_seconds + 7, kNear);
}

TEST(SimulationTest, PlacementIsChargedOnceBeyondTheRolloutsTail) {
  const LoadTable load = imbalanced_load();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulationInput input{.load = load, .plan = plan, .cost = cost};
  const double alone = simulate_step(input, nullptr, {}).step_seconds;
  const auto placed = [&](double tail) {
    const SimulatedStep s = simulate_step(input, nullptr, {.placement_seconds = 3, .rollout_tail_seconds = tail});
    EXPECT_EQ(s.step_seconds, alone);
    EXPECT_EQ(s.placed_step_seconds, alone + s.exposed_placement_seconds);
    return s.exposed_placement_seconds;
  };
  EXPECT_EQ(placed(0), 3);
  EXPECT_EQ(placed(2), 1);
  EXPECT_EQ(placed(5), 0);
}

TEST(SimulationTest, RejectsPlansLoadsAndModelsThatDoNotFit) {
  const LoadTable load = imbalanced_load();
  StepPlan plan = homes_plan(load, 0);
  const auto message = [&](const CostModel& cost) -> std::string {
    try {
      simulate_phase({.load = load, .plan = plan, .cost = cost}, {});
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(round_cost(1, 4)), "experts: the plan has 2, the model has 4");
  const CostModel two_of_two{round_cluster(), round_model(1, 2, 2), round_options()};
  EXPECT_THAT(message(two_of_two), testing::HasSubstr("top_k"));
  plan.slot_tokens(0, 0, 0, 0) = Tokens{89};
  for (const Dispatch dispatch : {Dispatch::kRow, Dispatch::kToken}) {
    CostOptions options = round_options();
    options.dispatch = dispatch;
    EXPECT_THAT(message({round_cluster(), round_model(1, 2), options}), testing::HasSubstr("expert 0"));
  }
}

}  // namespace
}  // namespace foremoe
