// Tests properties of every simulation, over random plans of ForeMoE's planner on random loads.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "foremoe/core/timeline.h"
#include "foremoe/policy/systems/fastermoe.h"
#include "foremoe/policy/systems/ultraep.h"
#include "foremoe/sim/phase_profile.h"
#include "foremoe/sim/phase_transfers.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/testing/simulated_plans.h"

namespace foremoe {
namespace {

using sim_test::random_load;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

struct Case {
  LoadTable load;
  StepPlan plan;
};

// Plans of every residency, one or two micro-steps in flight, on two nodes of two ranks.
template <class Visit>
void for_random_cases(const Visit& visit) {
  Random random(11);
  ThreadPool pool(1);
  for (const int in_flight : {1, 2}) {
    for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}) {
      if (residency == Residency::kFree && in_flight > 1) continue;
      for (int trial = 0; trial < 4; ++trial) {
        Case c{.load = random_load({}, random)};
        const PlannerOptions options{.guest_slots = 1 + trial % 2, .residency = residency, .in_flight = in_flight};
        const auto homes = contiguous_homes(c.load.num_layers(), c.load.num_experts(), c.load.num_ranks());
        c.plan = plan_step({.load = c.load, .home = homes, .options = options}, pool).plan;
        SCOPED_TRACE(std::string(to_string(residency)) + ", trial " + std::to_string(trial));
        visit(c);
      }
    }
  }
}

std::vector<Phase> phases_of(const Case& c) {
  if (c.plan.in_flight > 1) return {Phase::kPolicyUpdate};
  return {Phase::kRecompute, Phase::kPolicyUpdate};
}

// squared_lengths: [micro_step][rank]; empty: unknown.
SimulatedPhase simulate(const Case& c, const Cluster& cluster, SimulationOptions options,
                        const Array<double, 2>& squared_lengths = {}) {
  CostOptions given = round_options();
  if (!squared_lengths.empty()) given.sequence_tokens = std::nullopt;
  const CostModel cost(cluster, round_model(c.load.num_layers(), c.load.num_experts()), given);
  return simulate_phase({.load = c.load, .plan = c.plan, .cost = cost, .squared_lengths = squared_lengths}, options);
}

// Links that hide some copies but not all.
Cluster busy_cluster() {
  Cluster cluster = round_cluster(2);
  cluster.peers.bytes_per_second = 1200;
  cluster.network.bytes_per_second = 600;
  cluster.host.bytes_per_second = 800;
  cluster.switch_bytes_per_second = 1000;
  cluster.host_memory_bytes_per_second = 1400;
  cluster.ranks_per_switch = 2;
  cluster.host.latency_seconds = 0.01;
  return cluster;
}

TEST(SimulationPropertiesTest, MoreBandwidthIsNeverSlower) {
  const std::vector<std::function<void(Cluster&)>> faster{[](Cluster& c) { c.peers.bytes_per_second *= 1.7; },
                                                          [](Cluster& c) { c.network.bytes_per_second *= 2; },
                                                          [](Cluster& c) { c.host.bytes_per_second *= 3; },
                                                          [](Cluster& c) { c.switch_bytes_per_second *= 1.1; },
                                                          [](Cluster& c) { c.host_memory_bytes_per_second *= 5; },
                                                          [](Cluster& c) { c.host.latency_seconds = 0; },
                                                          [](Cluster& c) { c.flops_per_second *= 1.3; }};
  bool any_exposed = false;
  for_random_cases([&](const Case& c) {
    for (const Phase phase : phases_of(c)) {
      const SimulatedPhase before = simulate(c, busy_cluster(), {.phase = phase});
      any_exposed = any_exposed || before.parts.exposed_copies > 0;
      for (std::size_t i = 0; i < faster.size(); ++i) {
        Cluster cluster = busy_cluster();
        faster[i](cluster);
        EXPECT_LE(simulate(c, cluster, {.phase = phase}).seconds, before.seconds * (1 + 1e-12)) << "change " << i;
      }
    }
  });
  EXPECT_TRUE(any_exposed) << "the cases show nothing";
}

TEST(SimulationPropertiesTest, SplittingASequenceIsNeverSlower) {
  Random random(5);
  bool any_exposed = false;
  int faster = 0;
  for_random_cases([&](const Case& c) {
    const std::array shape{static_cast<std::size_t>(c.load.num_micro_steps()),
                           static_cast<std::size_t>(c.load.num_ranks())};
    Array<double, 2> squares(shape);
    for (double& of_batch : squares.flat()) of_batch = static_cast<double>(random.below(20'000));
    for (int i = 0; i < 8; ++i) {
      const auto first = static_cast<double>(1 + random.below(80));
      const auto second = static_cast<double>(1 + random.below(80));
      double& batch = squares.flat()[random.below(squares.size())];
      batch += (first + second) * (first + second);
      std::vector<SimulatedPhase> whole;
      for (const Phase phase : phases_of(c)) whole.push_back(simulate(c, busy_cluster(), {.phase = phase}, squares));
      batch -= 2 * first * second;
      for (const SimulatedPhase& before : whole) {
        const double after = simulate(c, busy_cluster(), {.phase = before.phase}, squares).seconds;
        EXPECT_LE(after, before.seconds * (1 + 1e-12));
        faster += after < before.seconds * (1 - 1e-6);
        any_exposed = any_exposed || before.parts.exposed_copies > 0;
      }
    }
  });
  EXPECT_GT(faster, 10) << "the cases show nothing";
  EXPECT_TRUE(any_exposed) << "shorter attention hides fewer copies";
}

TEST(SimulationPropertiesTest, NothingIsFasterThanIdealOrExposedWithoutCopies) {
  for_random_cases([](const Case& c) {
    for (const Phase phase : phases_of(c)) {
      const SimulatedPhase simulated = simulate(c, busy_cluster(), {.phase = phase});
      EXPECT_GE(simulated.seconds * (1 + 1e-12), simulated.ideal_seconds);
      EXPECT_NEAR(simulated.seconds, simulated.parts.sum(), 1e-9);
      EXPECT_LE(simulated.utilisation, 1 + 1e-12);
      if (simulated.copies == 0) {
        EXPECT_EQ(simulated.parts.exposed_copies + simulated.parts.exposed_gradients, 0);
      }
    }
  });
}

void expect_that_bytes_arrive(const SimulationInput& input, SimulationOptions options) {
  const CostModel& cost = input.cost;
  const SimulatedPhase simulated = simulate_phase(input, options);
  options.path = simulated.path;
  std::map<std::string, std::int64_t> expected;  // bytes per kind of the receiver's link
  std::int64_t arena = 0;
  const PhaseTransfers transfers = make_phase_transfers(input, options);
  for (const Transfer& t : transfers.transfers) {
    const bool near = t.way.from.value / 2 == t.way.to.value / 2;
    const char* const link = t.way.path == Path::kHost ? "switch" : near ? "peers" : "network";
    expected[link] += t.gradient ? cost.expert_gradient().value : cost.expert_weights().value;
  }
  for (const auto& node : transfers.arena) arena += static_cast<std::int64_t>(node.size());
  for (const LinkTraffic& traffic : simulated.traffic) {
    if (traffic.link == "peers") {
      EXPECT_EQ((traffic.copies + traffic.gradients).value, expected["peers"]);
    } else if (traffic.link == "host memory") {
      EXPECT_EQ(traffic.copies.value, expected["switch"] + arena * cost.expert_weights().value);
    }
  }
  std::int64_t between = 0;
  for (const Bytes bytes : simulated.between_nodes.flat()) between += bytes.value;
  const LinkTraffic& network = simulated.traffic[1];
  EXPECT_EQ((network.rows + network.copies + network.gradients).value, between);
}

// Guests are kept only if activations are kept.
CostModel cost_with_kept_activations(const LoadTable& load) {
  CostOptions options = round_options();
  options.recompute_activations = false;
  return {busy_cluster(), round_model(load.num_layers(), load.num_experts()), options};
}

// Nearly all tokens choose expert 0, so all ranks get a replica of it.
Case hot_expert(int ranks) {
  Random random(13);
  ThreadPool pool(1);
  Case c{.load = random_load({.ranks = ranks, .experts = 2 * ranks}, random)};
  for (int m = 0; m < c.load.num_micro_steps(); ++m) {
    for (int l = 0; l < c.load.num_layers(); ++l) {
      for (int r = 0; r < c.load.num_ranks(); ++r) c.load.load(m, l, r, 0) += Tokens{900};
    }
  }
  const auto homes = contiguous_homes(c.load.num_layers(), c.load.num_experts(), c.load.num_ranks());
  const PlannerOptions options{.guest_slots = 1, .residency = Residency::kShared};
  c.plan = plan_step({.load = c.load, .home = homes, .options = options}, pool).plan;
  return c;
}

TEST(SimulationPropertiesTest, EveryByteSentIsReceived) {
  const auto expect_of_all_ways = [](const Case& c) {
    const CostModel cost = cost_with_kept_activations(c.load);
    const SimulationInput input{.load = c.load, .plan = c.plan, .cost = cost};
    for (const Phase phase : phases_of(c)) {
      constexpr OnlineWork kWays[] = {
          {},
          {.own_experts_first = true, .plans_after_dispatch = true, .results_return = true},
          {.own_experts_first = true, .keeps_guests = true, .sources = send_in_ring, .gradients_go_to_sources = true},
          {.sources = send_by_relays_of_group}};
      for (const OnlineWork& online : kWays) {
        SimulationOptions options{.phase = phase, .online = online};
        expect_that_bytes_arrive(input, options);
        options.path = PathChoice::kHost;
        expect_that_bytes_arrive(input, options);
      }
    }
  };
  for_random_cases(expect_of_all_ways);
  const Case hot = hot_expert(10);  // relays need a domain of more than eight ranks
  expect_of_all_ways(hot);

  const auto copies = [&](OnlineWork online, bool from_home) {
    online.copies_after_router = true;
    const CostModel cost = cost_with_kept_activations(hot.load);
    const auto all = make_phase_transfers({.load = hot.load, .plan = hot.plan, .cost = cost},
                                          {.phase = Phase::kPolicyUpdate, .path = PathChoice::kPeer, .online = online});
    return std::ranges::count_if(all.transfers, [&](const Transfer& t) {
      return !t.gradient && (!from_home || t.way.from == hot.plan.home(0, t.expert));
    });
  };
  EXPECT_LT(copies({.sources = send_in_ring}, true), copies({}, true)) << "no rank passes anything on";
  EXPECT_LT(copies({.sources = send_by_relays_of_group}, true), copies({}, true)) << "no relay passes anything on";
  EXPECT_LT(copies({.keeps_guests = true}, false), copies({}, false)) << "no guest is kept";
}

// Plans for one and for several micro-steps in flight may place guests alike; then their rows are counted once.
TEST(SimulationPropertiesTest, AStepWithTwoPlansHasThePhasesOfEach) {
  ThreadPool pool(1);
  std::array<int, 2> cases{};  // with one profile, and with two
  for_random_cases([&](const Case& c) {
    if (c.plan.in_flight == 1) return;
    const PlannerOptions options{.guest_slots = c.plan.guest_slots, .residency = c.plan.residency};
    const auto homes = contiguous_homes(c.load.num_layers(), c.load.num_experts(), c.load.num_ranks());
    const StepPlan recompute = plan_step({.load = c.load, .home = homes, .options = options}, pool).plan;
    const CostModel cost(busy_cluster(), round_model(c.load.num_layers(), c.load.num_experts()), round_options());
    const SimulationInput input{.load = c.load, .plan = c.plan, .cost = cost};
    const SimulatedStep step = simulate_step(input, &recompute, {});
    const SimulatedPhase first =
        simulate_phase({.load = c.load, .plan = recompute, .cost = cost}, {.phase = Phase::kRecompute});
    const SimulatedPhase second =
        simulate_phase({.load = c.load, .plan = c.plan, .cost = cost}, {.phase = Phase::kPolicyUpdate});
    EXPECT_EQ(step.recompute.seconds, first.seconds);
    EXPECT_EQ(step.recompute.memory.sum(), first.memory.sum());
    EXPECT_EQ(step.policy_update.seconds, second.seconds);
    EXPECT_EQ(step.policy_update.memory.sum(), second.memory.sum());
    const StepProfile profile = profile_step(input, &recompute, {}, pool);
    ++cases[profile.policy_update == profile.recompute ? 0 : 1];
  });
  EXPECT_GT(cases[0], 0);
  EXPECT_GT(cases[1], 0);
}

// If planning happens between dispatch and combine, neither can follow the plan.
TEST(SimulationPropertiesTest, AnExchangeBeforeThePlanUsesHomes) {
  constexpr OnlineWork kAfterDispatch{
      .copies_after_router = true, .planning_seconds = 1e-4, .own_experts_first = true, .plans_after_dispatch = true};
  int shrunk = 0;  // dispatches of plans made before the exchange
  for_random_cases([&](const Case& c) {
    const Case homes{.load = c.load, .plan = sim_test::homes_plan(c.load, 0, Residency::kStatic, c.plan.in_flight)};
    for (const Phase phase : phases_of(c)) {
      const SimulatedPhase unbalanced = simulate(homes, busy_cluster(), {.phase = phase});
      const SimulatedPhase late = simulate(c, busy_cluster(), {.phase = phase, .online = kAfterDispatch});
      EXPECT_EQ(late.parts.dispatch, unbalanced.parts.dispatch);
      EXPECT_EQ(late.parts.combine, unbalanced.parts.combine);
      const SimulatedPhase before = simulate(c, busy_cluster(), {.phase = phase});
      shrunk += before.parts.dispatch < unbalanced.parts.dispatch ? 1 : 0;
    }
  });
  EXPECT_GT(shrunk, 0) << "the cases show nothing";
}

// One set of buffers has the guests of one turn, forward or backward.
TEST(SimulationPropertiesTest, PlanningAfterTheRouterNeedsGuestsOfOneTurn) {
  int backward = 0;
  for_random_cases([&](const Case& c) {
    if (c.plan.residency != Residency::kShared) return;
    const CostModel cost(busy_cluster(), round_model(c.load.num_layers(), c.load.num_experts()), round_options());
    for (const Phase phase : phases_of(c)) {
      const PhaseTransfers transfers =
          make_phase_transfers({.load = c.load, .plan = c.plan, .cost = cost},
                               {.phase = phase, .depth = 3, .online = {.copies_after_router = true}});
      for (const Transfer& t : transfers.transfers) {
        if (t.gradient) continue;
        EXPECT_EQ(t.begins, t.deadline);
        backward += transfers.order[t.begins].pass == Pass::kBackward ? 1 : 0;
      }
    }
  });
  EXPECT_GT(backward, 0) << "the cases show nothing";
}

// The last expert span of a turn needs all of its copies, so it must begin after they have arrived.
void expect_copies_before_experts(const nlohmann::json& trace) {
  std::map<std::pair<int, std::string>, double> arrived;  // [rank, "micro-step …" of the turn]
  std::map<std::pair<int, std::string>, double> begun;
  for (const auto& span : trace["traceEvents"]) {
    if (span["ph"] != "X") continue;
    const std::string name = span["name"];
    const auto turn = name.find("micro-step");
    if (turn == std::string::npos) continue;
    const std::pair key{span["pid"].get<int>(), name.substr(turn)};
    if (name.find(" for micro-step") != std::string::npos && name.find("gradient") == std::string::npos) {
      arrived[key] = std::max(arrived[key], span["ts"].get<double>() + span["dur"].get<double>());
    } else if (name.starts_with("experts,") && span["tid"] == static_cast<int>(Lane::kExperts)) {
      begun[key] = std::max(begun[key], span["ts"].get<double>());
    }
  }
  EXPECT_FALSE(begun.empty());
  for (const auto& [key, at] : arrived) {
    ASSERT_TRUE(begun.contains(key)) << key.second;
    EXPECT_LE(at, begun[key] + 0.002) << "rank " << key.first << ", " << key.second;  // whole nanoseconds
  }
}

TEST(SimulationPropertiesTest, NothingIsComputedBeforeItsCopiesHaveArrived) {
  const OnlineWork ways[] = {{},
                             {.copies_after_router = true, .planning_seconds = 1e-4},
                             {.copies_after_router = true,
                              .own_experts_first = true,
                              .sources = send_in_ring,
                              .gradients_go_to_sources = true},
                             {.copies_after_router = true,
                              .planning_seconds = 1e-4,
                              .own_experts_first = true,
                              .plans_after_dispatch = true,
                              .results_return = true}};
  for_random_cases([&](const Case& c) {
    for (const OnlineWork& online : ways) {
      // Other plans have guests that serve no tokens in a turn; no experts wait for those.
      if (online.own_experts_first && c.plan.residency != Residency::kShared) continue;
      for (const Phase phase : phases_of(c)) {
        Timeline timeline;
        simulate(c, busy_cluster(), {.phase = phase, .online = online, .timeline = &timeline});
        expect_copies_before_experts(nlohmann::json::parse(timeline.to_json()));
      }
    }
  });
}

TEST(SimulationThreadsTest, ResultsAreIdenticalForAnyNumberOfThreads) {
  for_random_cases([](const Case& c) {
    ThreadPool pool(3);
    for (const Phase phase : phases_of(c)) {
      const auto text = [&](ThreadPool* lent) {
        Timeline timeline;
        const SimulatedPhase s = simulate(c, busy_cluster(), {.phase = phase, .pool = lent, .timeline = &timeline});
        std::string bytes = timeline.to_json();
        for (const double d : {s.seconds, s.ideal_seconds, s.utilisation, s.parts.exposed_copies}) {
          bytes.append(reinterpret_cast<const char*>(&d), sizeof(d));
        }
        return bytes;
      };
      EXPECT_EQ(text(nullptr), text(&pool));
    }
  });
}

}  // namespace
}  // namespace foremoe
