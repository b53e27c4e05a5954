#include "foremoe/sim/simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/plan/route_tokens.h"
#include "foremoe/policy/systems/feplb.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/simulated_plans.h"

namespace foremoe {
namespace {

using sim_test::homes_plan;
using sim_test::one_layer;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

constexpr double kNear = 1e-9;  // relative to seconds around one

struct Simulated {
  const LoadTable& load;
  const StepPlan& plan;
  CostModel cost;

  SimulatedPhase phase(Phase phase, SimulationOptions options = {}) const {
    options.phase = phase;
    return simulate_phase({.load = load, .plan = plan, .cost = cost}, options);
  }
};

CostModel round_cost(int layers, int experts, int ranks_per_node = 2) {
  return {round_cluster(ranks_per_node), round_model(layers, experts), round_options()};
}

// Ranks 0 and 1 hold 100 and 40 tokens. Of expert 0 (at home on rank 0) there are 60 + 30 rows, of expert 1 40 + 10.
LoadTable lopsided() { return one_layer({{{60, 40}, {30, 10}}}); }

TEST(SimulationTest, AForwardTakesWhatItsSlowestRankTakesInEveryPart) {
  const LoadTable load = lopsided();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulatedPhase phase = Simulated{load, plan, cost}.phase(Phase::kRecompute);

  const Tokens most{100};  // tokens of rank 0
  EXPECT_NEAR(phase.parts.dense, cost.dense(most, Pass::kForward) + cost.other_layers(most, Pass::kForward), kNear);
  // Rank 0 sends 40 rows and receives 30, rank 1 the other way round: 40 rows · 20 bytes ÷ 8000 bytes/s = 0.1 s.
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
  // At the mean: 70 rows in 0.7 s; rows sent and received are (40 + 30) / 2 = 35 either way, 0.0875 s.
  EXPECT_NEAR(phase.ideal_seconds, phase.parts.dense + 0.7 + 2 * 0.0875, kNear);
  EXPECT_NEAR(phase.mean_expert_seconds, 0.7, kNear);
  EXPECT_NEAR(phase.ideal_exchange_seconds, 2 * 0.0875, kNear);
}

TEST(SimulationTest, PlanningTakesATimeForEachSlotThatTheExchangeOfUnplannedRowsHides) {
  const LoadTable load = lopsided();
  const StepPlan plan = homes_plan(load, 2);  // three slots on each of two ranks
  const auto parts = [&](double unplanned) {
    return Simulated{load, plan, round_cost(1, 2)}
        .phase(Phase::kRecompute, {.online = {.planning_seconds = 0.01,
                                              .planning_seconds_per_slot = 0.02,
                                              .dispatched_unplanned = unplanned}})
        .parts;
  };
  EXPECT_NEAR(parts(0).planning, 0.01 + 6 * 0.02, kNear);
  // Half of a dispatch of 0.1 s. The other half has the latency of an exchange of its own, here that of one row.
  EXPECT_NEAR(parts(0.5).planning, 0.13 - 0.05 + 20.0 / 8000, kNear);
  EXPECT_NEAR(parts(1).planning, 0.13 - 0.1, kNear) << "one exchange";
  EXPECT_NEAR(parts(0.5).dispatch, 0.1, kNear);
}

TEST(SimulationTest, APolicyUpdateGoesThereAndBackAndEndsWithTheOptimizer) {
  const LoadTable load = lopsided();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulatedPhase phase = Simulated{load, plan, cost}.phase(Phase::kPolicyUpdate);

  const Tokens most{100};
  double dense = 0;
  for (const Pass direction : {Pass::kForward, Pass::kBackward}) {
    dense += cost.dense(most, direction) + cost.other_layers(most, direction);
  }
  EXPECT_NEAR(phase.parts.dense, dense, kNear);
  // Forward, forward anew, backward: three times there and back.
  EXPECT_NEAR(phase.parts.dispatch, 0.3, kNear);
  EXPECT_NEAR(phase.parts.combine, 0.3, kNear);
  // A backward multiplies twice as much and first computes the forward anew: 0.9 + 3 · 0.9 s.
  EXPECT_NEAR(phase.parts.experts, 3.6, kNear);
  EXPECT_NEAR(phase.mean_expert_seconds, 2.8, kNear);
  EXPECT_NEAR(phase.ideal_exchange_seconds, 6 * 0.0875, kNear);
  EXPECT_NEAR(phase.parts.optimizer, cost.optimizer(1), kNear);
  EXPECT_NEAR(phase.seconds, phase.parts.sum(), kNear);
}

TEST(SimulationTest, AtPerfectBalanceAStepIsIdeal) {
  const LoadTable load = one_layer({{{25, 25}, {25, 25}}, {{10, 10}, {10, 10}}});
  const StepPlan plan = homes_plan(load, 0);
  for (const Phase kind : {Phase::kRecompute, Phase::kPolicyUpdate}) {
    const SimulatedPhase phase = Simulated{load, plan, round_cost(1, 2)}.phase(kind);
    EXPECT_NEAR(phase.seconds, phase.ideal_seconds, kNear * phase.seconds);
  }
}

// Two micro-steps, all ranks computing 50 rows in each; in the second rank 0 serves 30 rows of expert 1 as a guest.
struct OneCopy {
  LoadTable load = one_layer({{{50, 0}, {0, 50}}, {{20, 30}, {0, 50}}});
  StepPlan plan = homes_plan(load, 1);

  OneCopy() {
    plan.slot_expert(1, 0, 0, 1) = ExpertId{1};
    plan.slot_tokens(1, 0, 0, 1) = Tokens{30};
    plan.slot_tokens(1, 0, 1, 0) = Tokens{50};
  }
};

TEST(SimulationTest, ACopyThatTakesHalfAgainItsWindowIsExposedByTheExcess) {
  const OneCopy step;
  const SimulationOptions one_ahead{.path = PathChoice::kPeer, .depth = 1};
  CostModel cost = round_cost(1, 2);
  // No rows are exchanged: the copy may travel from the beginning of micro-step 0 until the experts of micro-step 1.
  const SimulatedPhase hidden = Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, one_ahead);
  ASSERT_EQ(hidden.copies, 1);
  EXPECT_EQ(hidden.parts.exposed_copies, 0);
  EXPECT_EQ(hidden.parts.dispatch, 0);
  const double window = hidden.parts.dense + 0.5;  // both micro-steps' attention, the experts of the first: 50 rows

  Cluster slow = round_cluster();
  slow.peers.bytes_per_second = 600 / (1.5 * window);
  const SimulatedPhase phase =
      Simulated{step.load, step.plan, {slow, cost.model(), cost.options()}}.phase(Phase::kRecompute, one_ahead);
  EXPECT_NEAR(phase.parts.exposed_copies, 0.5 * window, kNear);
  EXPECT_NEAR(phase.seconds, 1.5 * window + 0.5, kNear);
}

TEST(SimulationTest, ACopyThatBeginsAfterTheRouterIsExposedWhole) {
  const OneCopy step;
  const CostModel cost = round_cost(1, 2);
  const SimulationOptions online{.path = PathChoice::kPeer,
                                 .online = {.copies_after_router = true, .planning_seconds = 0.25}};
  const SimulatedPhase phase = Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, online);
  EXPECT_NEAR(phase.parts.exposed_copies, 600.0 / 8000, kNear);
  EXPECT_NEAR(phase.parts.planning, 2 * 0.25, kNear);
}

TEST(SimulationTest, WhoPlansByTheCountsOfAllRanksGathersThemInEveryForward) {
  const OneCopy step;
  Cluster cluster = round_cluster();
  cluster.peers.latency_seconds = 0.01;
  const CostModel cost{cluster, round_model(1, 2), round_options()};
  // Two experts' counts of one other rank, 8 bytes at 8000 a second.
  const double gather = 0.01 + 8.0 / 8000;
  for (const Phase kind : {Phase::kRecompute, Phase::kPolicyUpdate}) {
    const auto planning = [&](const OnlineWork& online) {
      return Simulated{step.load, step.plan, cost}
          .phase(kind, {.path = PathChoice::kPeer, .online = online})
          .parts.planning;
    };
    EXPECT_EQ(planning({}), 0);
    EXPECT_NEAR(planning({.gathers_loads = true}), 2 * gather, kNear) << "two micro-steps";
    EXPECT_NEAR(planning({.gathers_loads = true, .planning_seconds = 0.25}), 2 * (0.25 + gather), kNear);
  }
  // Beside own experts, 0.2 s, where planning follows dispatch.
  const auto exposed = [&](bool gathers_loads) {
    const OnlineWork online{.copies_after_router = true,
                            .gathers_loads = gathers_loads,
                            .planning_seconds = 0.25,
                            .own_experts_first = true,
                            .plans_after_dispatch = true};
    return Simulated{step.load, step.plan, cost}
        .phase(Phase::kRecompute, {.path = PathChoice::kPeer, .online = online})
        .parts.exposed_copies;
  };
  EXPECT_NEAR(exposed(true) - exposed(false), gather, kNear);
}

TEST(SimulationTest, WhoPlansAheadGathersTheLoadsOfTheWholeStepOnceBeforeRecompute) {
  const OneCopy step;
  Cluster cluster = round_cluster();
  cluster.peers.latency_seconds = 0.01;
  const CostModel cost{cluster, round_model(6, 2), round_options()};
  const SimulationInput input{.load = step.load, .plan = step.plan, .cost = cost};
  const SimulatedStep ahead =
      simulate_step({.recompute = input, .policy_update = input}, {.phase = {.plans_ahead = true}});
  const SimulatedStep otherwise = simulate_step({.recompute = input, .policy_update = input}, {});
  // 8 bytes, as above, of two micro-steps and of all six layers of the model, for which the plan's layer stands.
  const double gather = 0.01 + 2 * 6 * 8.0 / 8000;
  EXPECT_NEAR(ahead.recompute.parts.planning, gather, kNear);
  EXPECT_EQ(ahead.policy_update.parts.planning, 0);
  EXPECT_NEAR(ahead.recompute.seconds, ahead.recompute.parts.sum(), kNear);
  EXPECT_NEAR(ahead.step_seconds - otherwise.step_seconds, gather, kNear);
  EXPECT_EQ(ahead.policy_update.seconds, otherwise.policy_update.seconds);
}

TEST(SimulationTest, SortingRowsHidesPlanningWhereRowsLeaveSorted) {
  const OneCopy step;
  for (const auto& [dispatch, hidden] : {std::pair{Dispatch::kRow, true}, {Dispatch::kToken, false}}) {
    CostOptions options = round_options();
    options.dispatch = dispatch;
    const CostModel cost(round_cluster(), round_model(1, 2), options);
    const double sorting = cost.sort(Tokens{50});  // no rank has more rows in either micro-step
    ASSERT_GT(sorting, 0);
    const auto planning = [&](double seconds) {
      const OnlineWork online{.planning_seconds = seconds, .plans_beside_sorting = true};
      return Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, {.online = online}).parts.planning;
    };
    EXPECT_NEAR(planning(sorting / 2), hidden ? 0 : sorting, kNear);
    EXPECT_NEAR(planning(0.25 + sorting), 2 * (hidden ? 0.25 : 0.25 + sorting), kNear);
  }
}

TEST(SimulationTest, ARanksOwnExpertsHideThePlanAndCopiesOfItsGuestsWhereTheyComeFirst) {
  const OneCopy step;
  const CostModel cost = round_cost(1, 2);
  // Rank 0 has 20 rows of its own, 0.2 s, and then a guest with 30. Its weights take 600 / 8000 s, its 30 rows of 20
  // bytes, which dispatch has sent to rank 1, as long. Nobody waits for its results.
  const double one_way = 30 * 20.0 / 8000;
  const auto exposed = [&](double planning_seconds) {
    const SimulationOptions online{.path = PathChoice::kPeer,
                                   .online = {.copies_after_router = true,
                                              .planning_seconds = planning_seconds,
                                              .own_experts_first = true,
                                              .plans_after_dispatch = true}};
    const SimulatedPhase phase = Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, online);
    EXPECT_EQ(phase.parts.planning, 0);
    EXPECT_NEAR(phase.parts.experts, 0.5 + 0.5, kNear);
    return phase.parts.exposed_copies;
  };
  EXPECT_NEAR(exposed(0), 0, kNear);
  EXPECT_NEAR(exposed(0.05), 0, kNear);
  EXPECT_NEAR(exposed(0.25), 0.25 + 600.0 / 8000 + one_way - 0.2, kNear);
}

TEST(SimulationTest, ResultsOfMovedRowsReturnToTheirHomesAfterTheExpertsAndBeforeCombine) {
  const OneCopy step;
  Cluster cluster = round_cluster();
  cluster.peers.latency_seconds = 0.01;
  const CostModel cost{cluster, round_model(1, 2), round_options()};
  const auto phase = [&](Phase kind, bool results_return, Timeline* timeline = nullptr) {
    const SimulationOptions options{.path = PathChoice::kPeer,
                                    .online = {.copies_after_router = true,
                                               .own_experts_first = true,
                                               .plans_after_dispatch = true,
                                               .results_return = results_return},
                                    .timeline = timeline};
    return Simulated{step.load, step.plan, cost}.phase(kind, options);
  };
  // 30 rows of 20 bytes at 8000 bytes a second; in the policy update once more, and twice where a backward begins with
  // a forward, in one message.
  const double one_way = 30 * 20.0 / 8000;
  for (const auto& [kind, messages, trips] : {std::tuple{Phase::kRecompute, 1, 1}, {Phase::kPolicyUpdate, 2, 3}}) {
    const SimulatedPhase hidden = phase(kind, false);
    const SimulatedPhase charged = phase(kind, true);
    EXPECT_NEAR(charged.parts.exposed_copies - hidden.parts.exposed_copies, messages * 0.01 + trips * one_way, kNear);
    EXPECT_NEAR(charged.seconds - hidden.seconds, messages * 0.01 + trips * one_way, kNear);
    EXPECT_EQ(charged.parts.combine, hidden.parts.combine);
    EXPECT_EQ((charged.traffic[0].rows - hidden.traffic[0].rows).value, trips * 30 * 20);
  }
  const auto exchanges = [&](bool results_return) {
    Timeline timeline;
    phase(Phase::kRecompute, results_return, &timeline);
    const std::string json = timeline.to_json();
    std::size_t count = 0;
    for (auto at = json.find("exchange,"); at != std::string::npos; at = json.find("exchange,", at + 1)) ++count;
    return count;
  };
  EXPECT_EQ(exchanges(true), exchanges(false) + 2) << "one span on each rank";
}

TEST(SimulationTest, DispatchAndCombineKnowNothingOfAPlanThatIsMadeBetweenThem) {
  const OneCopy step;
  for (const Dispatch dispatch : {Dispatch::kRow, Dispatch::kToken}) {
    CostOptions cost_options = round_options();
    cost_options.dispatch = dispatch;
    const CostModel cost(round_cluster(), round_model(1, 2), cost_options);
    const SimulationOptions after_dispatch{.path = PathChoice::kPeer, .online = make_feplb()->online()};
    const StepPlan homes = homes_plan(step.load, 0);
    for (const Phase kind : {Phase::kRecompute, Phase::kPolicyUpdate}) {
      const SimulatedPhase unbalanced = Simulated{step.load, homes, cost}.phase(kind);
      const SimulatedPhase phase = Simulated{step.load, step.plan, cost}.phase(kind, after_dispatch);
      EXPECT_GT(unbalanced.parts.dispatch, 0);
      EXPECT_EQ(phase.parts.dispatch, unbalanced.parts.dispatch);
      EXPECT_EQ(phase.parts.combine, unbalanced.parts.combine);
      // 30 rows of 20 bytes go on to rank 0 and back, beside those of the exchange; thrice where a backward begins with
      // a forward.
      const std::int64_t trips = kind == Phase::kRecompute ? 1 : 3;
      EXPECT_EQ((phase.traffic[0].rows - unbalanced.traffic[0].rows).value, 2 * trips * 30 * 20);
    }
    // With a plan that is made before, rank 0 keeps its rows.
    EXPECT_EQ((Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute).parts.dispatch), 0);
  }
}

TEST(SimulationTest, CopiesOfWhoPlansOnlineComeFromPeersUnlessAskedForOtherwise) {
  const LoadTable load = one_layer({{{30, 0, 0}, {30, 0, 0}, {30, 0, 0}}}, 3);
  StepPlan plan = homes_plan(load, 1);
  plan.slot_tokens(0, 0, 0, 0) = Tokens{30};
  for (const int guest : {1, 2}) {
    plan.slot_expert(0, 0, guest, 1) = ExpertId{0};
    plan.slot_tokens(0, 0, guest, 1) = Tokens{30};
  }
  const auto arena = [&](PathChoice path, bool copies_after_router) {
    const SimulationOptions options{.path = path, .online = {.copies_after_router = copies_after_router}};
    return Simulated{load, plan, round_cost(1, 3, 3)}.phase(Phase::kRecompute, options).arena;
  };
  EXPECT_EQ(arena(PathChoice::kAuto, true), Bytes{0});
  EXPECT_EQ(arena(PathChoice::kHost, true), Bytes{600});
}

TEST(SimulationTest, FeplbsBuffersTakeWhatItsAuthorsPublish) {
  // GLM-5: experts of 3 · 6144 · 2048 weights in 16 bits, 72 MiB; eight buffers for all layers, 576 MiB.
  const LoadTable load = one_layer({{{30, 0}, {30, 0}}});
  StepPlan plan = homes_plan(load, 8, Residency::kShared);
  plan.slot_expert(0, 0, 1, 1) = ExpertId{0};
  plan.slot_tokens(0, 0, 0, 0) = plan.slot_tokens(0, 0, 1, 1) = Tokens{30};
  ModelShape glm5 = round_model(18, 2);
  glm5.hidden = 6144;
  glm5.intermediate = 2048;
  const CostModel cost(round_cluster(), glm5, round_options());
  const auto buffers = [&](const OnlineWork& online) {
    const SimulationOptions options{.path = PathChoice::kPeer, .depth = 2, .online = online};
    return Simulated{load, plan, cost}.phase(Phase::kPolicyUpdate, options).memory.guest_weights;
  };
  EXPECT_EQ(buffers(make_feplb()->online()), Bytes{576LL << 20});
  EXPECT_EQ(buffers({}), Bytes{2 * (576LL << 20)});  // one set for each turn that copies may run ahead
}

TEST(SimulationTest, AGuestsGradientGoesHomeAndIsWaitedForAtTheEnd) {
  const OneCopy step;
  const CostModel cost = round_cost(1, 2);
  const SimulationOptions peers{.path = PathChoice::kPeer};
  const SimulatedPhase phase = Simulated{step.load, step.plan, cost}.phase(Phase::kPolicyUpdate, peers);
  // 300 parameters in float32 are 1200 bytes, 0.15 s. They leave after the last backward's experts; the attention of
  // that backward is all that hides them.
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

TEST(SimulationTest, LayersStandForThoseThatTheModelHasMore) {
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
  const double once = 2 * one.other_layers(Tokens{50}, Pass::kForward);  // of two micro-steps
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

TEST(SimulationTest, APlanThatPlacesFreelyIsCostedInThePolicyUpdateToo) {
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

TEST(SimulationTest, APolicyUpdateBeginsWithTheFreePlacementThatRecomputeLeaves) {
  const LoadTable load = one_layer({{{50, 0}, {0, 50}}, {{50, 0}, {0, 50}}});
  StepPlan plan = homes_plan(load, 0, Residency::kFree);
  const CostModel cost = round_cost(1, 2);
  const auto copies = [&] {
    const SimulationInput input{.load = load, .plan = plan, .cost = cost};
    const SimulatedStep step = simulate_step({.recompute = input, .policy_update = input}, {});
    EXPECT_EQ(step.policy_update.traffic[0].gradients, Bytes{2 * 1200}) << "two experts are away from home";
    return std::pair(step.recompute.copies, step.policy_update.copies);
  };
  const auto exchange_ranks = [&](int event) {
    std::swap(plan.slot_expert(event, 0, 0, 0), plan.slot_expert(event, 0, 1, 0));
    std::swap(plan.slot_tokens(event, 0, 0, 0), plan.slot_tokens(event, 0, 1, 0));
  };
  exchange_ranks(
      1);  // homes, then exchanged: two copies; and two that bring the homes back for the update's first event
  EXPECT_EQ(copies(), std::pair(2L, 4L));
  exchange_ranks(0);  // exchanged from the first event on: the update finds both where it wants them
  EXPECT_EQ(copies(), std::pair(2L, 0L));
  // A policy update by itself begins with homes.
  EXPECT_EQ((Simulated{load, plan, cost}.phase(Phase::kPolicyUpdate).copies), 2);
}

TEST(SimulationTest, ARepeatedLoadIsTheLoadWrittenOut) {
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

TEST(SimulationTest, AStepIsItsPhasesAndTheMovesOfHomes) {
  const LoadTable load = lopsided();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulationInput input{.load = load, .plan = plan, .cost = cost};
  const SimulatedStep step =
      simulate_step({.recompute = input, .policy_update = input}, {.home_moves = 2, .rollout_seconds = 7});
  const Simulated alone{load, plan, cost};
  EXPECT_EQ(step.recompute.seconds, alone.phase(Phase::kRecompute).seconds);
  EXPECT_EQ(step.policy_update.seconds, alone.phase(Phase::kPolicyUpdate).seconds);
  // Each of two ranks sends one expert: 300 parameters, 2 bytes of weights and 12 of optimizer, over 8000 bytes/s.
  EXPECT_NEAR(step.home_move_seconds, 300.0 * 14 / 8000, kNear);
  EXPECT_NEAR(step.step_seconds, step.recompute.seconds + step.policy_update.seconds + step.home_move_seconds, kNear);
  EXPECT_NEAR(step.rl_step_seconds, step.step_seconds + 7, kNear);
}

TEST(SimulationTest, ThePlacementOfAllLayersIsPaidOnceUnlessTheRolloutsTailHidesIt) {
  const LoadTable load = lopsided();
  const StepPlan plan = homes_plan(load, 0);
  const CostModel cost = round_cost(1, 2);
  const SimulationInput input{.load = load, .plan = plan, .cost = cost};
  const WholeStep step{.recompute = input, .policy_update = input};
  const double alone = simulate_step(step, {}).step_seconds;
  const auto placed = [&](double tail) {
    const SimulatedStep s = simulate_step(step, {.placement_seconds = 3, .rollout_tail_seconds = tail});
    EXPECT_EQ(s.step_seconds, alone);
    EXPECT_EQ(s.placed_step_seconds, alone + s.exposed_placement_seconds);
    return s.exposed_placement_seconds;
  };
  EXPECT_EQ(placed(0), 3);
  EXPECT_EQ(placed(2), 1);
  EXPECT_EQ(placed(5), 0);
}

// Of rows alone, over all links of a kind.
Bytes row_bytes(const SimulatedPhase& phase, std::string_view link) {
  const auto of = std::ranges::find(phase.traffic, link, &LinkTraffic::link);
  return of == phase.traffic.end() ? Bytes{} : of->rows;
}

TEST(SimulationTest, TheDispatchDecidesWhichRowsTravel) {
  const test::BatchedTrace recorded = test::random_trace(2, 400);
  const StepPlan plan = homes_plan(recorded.load, 0);
  const auto simulated = [&](Dispatch dispatch, bool with_tokens) {
    CostOptions options = round_options();
    options.dispatch = dispatch;
    const CostModel cost(round_cluster(), round_model(2, 8, 3), options);
    return simulate_phase({.load = recorded.load,
                           .plan = plan,
                           .cost = cost,
                           .trace = with_tokens ? &recorded.trace : nullptr,
                           .batching = with_tokens ? &recorded.batching : nullptr},
                          {});
  };
  const SimulatedPhase rows = simulated(Dispatch::kRow, true);
  EXPECT_EQ(rows.seconds, simulated(Dispatch::kRow, false).seconds);
  EXPECT_FALSE(rows.dispatch_estimated);
  const SimulatedPhase counted = simulated(Dispatch::kToken, true);
  EXPECT_FALSE(counted.dispatch_estimated);
  const SimulatedPhase expected = simulated(Dispatch::kToken, false);
  EXPECT_TRUE(expected.dispatch_estimated);
  EXPECT_EQ(expected.dispatch, Dispatch::kToken);

  std::int64_t between_nodes = 0;  // one row for each token that another node serves
  const SourceTokens tokens(recorded.trace, recorded.batching);
  for (int m = 0; m < 2; ++m) {
    for (int l = 0; l < 2; ++l) {
      const Topology topology = recorded.load.topology();
      const RoutedLayer routed = route_tokens({.load = recorded.load.load[m][l],
                                               .quotas = layer_quotas(plan, EventId{m}, LayerId{l}),
                                               .topology = topology});
      const TokenDispatch dispatch = token_dispatch(routed, {tokens, MicroStepId{m}, LayerId{l}, topology});
      for (int s = 0; s < 4; ++s) between_nodes += dispatch.to_node(s, 1 - s / 2).value;
    }
  }
  constexpr std::int64_t kThereAndBack = 2;
  EXPECT_EQ(row_bytes(counted, "network").value, kThereAndBack * between_nodes * 20);
  EXPECT_LT(row_bytes(counted, "network"), row_bytes(rows, "network"));
  EXPECT_NEAR(static_cast<double>(row_bytes(expected, "network").value),
              static_cast<double>(row_bytes(counted, "network").value), 0.05 * kThereAndBack * between_nodes * 20);
  EXPECT_LT(counted.parts.dispatch, rows.parts.dispatch);
  EXPECT_NEAR(expected.parts.dispatch, counted.parts.dispatch, 0.05 * counted.parts.dispatch);
}

TEST(SimulationTest, TokensThatAreExpectedChooseFromTheModelsGroups) {
  const test::BatchedTrace recorded = test::random_trace(2, 400);
  const StepPlan plan = homes_plan(recorded.load, 0);
  const auto between_nodes = [&](const ExpertGroups& groups) {
    CostOptions options = round_options();
    options.dispatch = Dispatch::kToken;
    ModelShape model = round_model(2, 8, 3);
    model.groups = groups;
    const CostModel cost(round_cluster(), model, options);
    return row_bytes(simulate_phase({.load = recorded.load, .plan = plan, .cost = cost}, {}), "network");
  };
  // Each of two nodes has the experts of one group, and a token takes those of one group alone.
  EXPECT_LT(between_nodes({.count = 2, .per_token = 1}), between_nodes({}));
}

TEST(SimulationTest, TheLargestMicroBatchFillsTheBudgetWithActivations) {
  SimulatedStep step;
  step.recompute.memory = {.state = Bytes{100}, .activations = Bytes{10}};
  step.policy_update.memory = {.state = Bytes{100}, .guest_weights = Bytes{50}, .activations = Bytes{50}};
  EXPECT_EQ(largest_micro_batch(step, Bytes{250}, Tokens{1000}), Tokens{2000});  // 100 bytes left, 50 used by 1000
  EXPECT_EQ(largest_micro_batch(step, Bytes{150}, Tokens{1000}), Tokens{0});
}

TEST(SimulationTest, WhatDoesNotFitIsRefusedByName) {
  const LoadTable load = lopsided();
  StepPlan plan = homes_plan(load, 0);
  const auto message = [&](const CostModel& cost) -> std::string {
    try {
      simulate_phase({.load = load, .plan = plan, .cost = cost}, {});
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(round_cost(1, 4)), "experts: the plan has 2, the model 4");
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
