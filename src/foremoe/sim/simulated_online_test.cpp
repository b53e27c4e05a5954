// Tests the charge for planning between router and experts, and for gathering loads to plan ahead.

#include <gtest/gtest.h>

#include "foremoe/policy/systems/feplb.h"
#include "foremoe/sim/simulation.h"
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

TEST(SimulatedOnline, TheExchangeOfUnplannedRowsHidesPlanning) {
  const LoadTable load = imbalanced_load();
  const StepPlan plan = homes_plan(load, 2);  // three slots on each of two ranks
  const auto parts = [&](double unplanned) {
    return Simulated{load, plan, round_cost(1, 2)}
        .phase(Phase::kRecompute, {.online = {.planning_seconds = 0.01,
                                              .planning_seconds_per_slot = 0.02,
                                              .dispatched_unplanned = unplanned}})
        .parts;
  };
  EXPECT_NEAR(parts(0).planning, 0.01 + 6 * 0.02, kNear);
  // Half of a 0.1 s dispatch hides planning. The other half is a second exchange with a latency of one row's time.
  EXPECT_NEAR(parts(0.5).planning, 0.13 - 0.05 + 20.0 / 8000, kNear);
  EXPECT_NEAR(parts(1).planning, 0.13 - 0.1, kNear) << "one exchange";
  EXPECT_NEAR(parts(0.5).dispatch, 0.1, kNear);
}

TEST(SimulatedOnline, ACopyThatBeginsAfterTheRouterIsFullyExposed) {
  const OneCopy step;
  const CostModel cost = round_cost(1, 2);
  const SimulationOptions online{.path = PathChoice::kPeer,
                                 .online = {.copies_after_router = true, .planning_seconds = 0.25}};
  const SimulatedPhase phase = Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute, online);
  EXPECT_NEAR(phase.parts.exposed_copies, 600.0 / 8000, kNear);
  EXPECT_NEAR(phase.parts.planning, 2 * 0.25, kNear);
}

TEST(SimulatedOnline, PlanningFromAllRanksCountsGathersThemInEveryForward) {
  const OneCopy step;
  Cluster cluster = round_cluster();
  cluster.peers.latency_seconds = 0.01;
  const CostModel cost{cluster, round_model(1, 2), round_options()};
  // One other rank's counts for two experts: 8 bytes at 8000 bytes/s.
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
  // If planning follows dispatch, own experts (0.2 s) hide it.
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

TEST(SimulatedOnline, PlanningAheadGathersTheStepsLoadsOnceBeforeRecompute) {
  const OneCopy step;
  Cluster cluster = round_cluster();
  cluster.peers.latency_seconds = 0.01;
  const CostModel cost{cluster, round_model(6, 2), round_options()};
  const SimulationInput input{.load = step.load, .plan = step.plan, .cost = cost};
  const SimulatedStep ahead = simulate_step(input, nullptr, {.phase = {.plans_ahead = true}});
  const SimulatedStep otherwise = simulate_step(input, nullptr, {});
  // 8 bytes, as above, for two micro-steps and all six layers of the model, which the plan's layer represents.
  const double gather = 0.01 + 2 * 6 * 8.0 / 8000;
  EXPECT_NEAR(ahead.recompute.parts.planning, gather, kNear);
  EXPECT_EQ(ahead.policy_update.parts.planning, 0);
  EXPECT_NEAR(ahead.recompute.seconds, ahead.recompute.parts.sum(), kNear);
  EXPECT_NEAR(ahead.step_seconds - otherwise.step_seconds, gather, kNear);
  EXPECT_EQ(ahead.policy_update.seconds, otherwise.policy_update.seconds);
}

TEST(SimulatedOnline, SortingRowsHidesPlanningIfRowsAreSentSorted) {
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

TEST(SimulatedOnline, OwnExpertsFirstHidePlanningAndGuestCopies) {
  const OneCopy step;
  const CostModel cost = round_cost(1, 2);
  // Rank 0 computes 20 rows of its own experts, 0.2 s, then 30 of a guest. The guest's weights take 600 / 8000 s, and
  // so do its 30 rows of 20 bytes, which dispatch has sent to rank 1. No rank waits for the guest's results.
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

TEST(SimulatedOnline, ResultsOfForwardedRowsReturnBetweenExpertsAndCombine) {
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
  // 30 rows of 20 bytes at 8000 bytes/s. The policy update sends these rows again: twice in one message if the backward
  // recomputes the forward.
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

TEST(SimulatedOnline, DispatchAndCombineIgnoreAPlanMadeBetweenThem) {
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
      // In addition to the exchange, 30 rows of 20 bytes are forwarded to rank 0 and back, three times if the backward
      // recomputes the forward.
      const std::int64_t trips = kind == Phase::kRecompute ? 1 : 3;
      EXPECT_EQ((phase.traffic[0].rows - unbalanced.traffic[0].rows).value, 2 * trips * 30 * 20);
    }
    // If the plan is made before dispatch, rank 0 keeps its rows.
    EXPECT_EQ((Simulated{step.load, step.plan, cost}.phase(Phase::kRecompute).parts.dispatch), 0);
  }
}

// Only expert 0 is fetched, but no rank knows this before the phase, so the arena contains all three experts.
TEST(SimulatedOnline, OnlineSystemsTakeTheQuickerPathWithAllExpertsInTheArena) {
  const LoadTable load = one_layer({{{30, 0, 0}, {30, 0, 0}, {30, 0, 0}}}, 3);
  StepPlan plan = homes_plan(load, 1);
  plan.slot_tokens(0, 0, 0, 0) = Tokens{30};
  for (const int guest : {1, 2}) {
    plan.slot_expert(0, 0, guest, 1) = ExpertId{0};
    plan.slot_tokens(0, 0, guest, 1) = Tokens{30};
  }
  const auto phase = [&](PathChoice path, bool copies_after_router) {
    const SimulationOptions options{.path = path, .online = {.copies_after_router = copies_after_router}};
    return Simulated{load, plan, round_cost(1, 3, 3)}.phase(Phase::kRecompute, options);
  };
  EXPECT_EQ(phase(PathChoice::kHost, false).arena, Bytes{600});
  const SimulatedPhase host = phase(PathChoice::kHost, true);
  EXPECT_EQ(host.arena, Bytes{3 * 600});
  const SimulatedPhase peer = phase(PathChoice::kPeer, true);
  EXPECT_EQ(peer.arena, Bytes{0});
  const SimulatedPhase chosen = phase(PathChoice::kAuto, true);
  EXPECT_EQ(chosen.seconds, std::min(peer.seconds, host.seconds));
  EXPECT_EQ(chosen.arena, peer.seconds <= host.seconds ? Bytes{0} : Bytes{3 * 600});
}

// One layer, one micro-step. The copy for the backward can run during the forward, in its own set of buffers.
TEST(SimulatedOnline, PrefetchingInTheBackwardExposesOnlyTheForward) {
  const LoadTable load = one_layer({{{30, 0}, {30, 0}}});
  StepPlan plan = homes_plan(load, 1, Residency::kShared);
  plan.slot_expert(0, 0, 1, 1) = ExpertId{0};
  plan.slot_tokens(0, 0, 0, 0) = plan.slot_tokens(0, 0, 1, 1) = Tokens{30};
  const CostModel cost = round_cost(1, 2);
  const auto phase = [&](Phase of, bool prefetches) {
    const SimulationOptions options{.path = PathChoice::kPeer,
                                    .depth = 2,
                                    .online = {.copies_after_router = true, .prefetches_in_backward = prefetches}};
    return Simulated{load, plan, cost}.phase(of, options);
  };
  const double once = 600.0 / 8000;
  EXPECT_NEAR(phase(Phase::kRecompute, true).parts.exposed_copies, once, kNear);
  EXPECT_NEAR(phase(Phase::kPolicyUpdate, false).parts.exposed_copies, 2 * once, kNear);
  EXPECT_NEAR(phase(Phase::kPolicyUpdate, true).parts.exposed_copies, once, kNear);
  EXPECT_EQ(phase(Phase::kPolicyUpdate, true).memory.guest_weights, Bytes{2 * 600});
  EXPECT_EQ(phase(Phase::kPolicyUpdate, false).memory.guest_weights, Bytes{600});
}

TEST(SimulatedOnline, FeplbsBuffersNeedThePublishedMemory) {
  // A GLM-5 expert has 3 · 6144 · 2048 weights in 16 bits, 72 MiB. Eight buffers for all layers need 576 MiB.
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
  EXPECT_EQ(buffers({}), Bytes{2 * (576LL << 20)});  // one set per turn that copies may run ahead
}

}  // namespace
}  // namespace foremoe
