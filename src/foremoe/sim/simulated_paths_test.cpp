// Tests the path of copies in a simulated phase, and that the engine executes the same schedule.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "foremoe/sim/simulation.h"
#include "foremoe/testing/simulated_plans.h"
#include "foremoe/testing/transfer_cluster.h"

namespace foremoe {
namespace {

using sim_test::random_load;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

constexpr sim_test::LoadShape kShape{.micro_steps = 8};

// Links whose rates differ by a factor of up to 100.
Cluster random_cluster(Random& random) {
  Cluster cluster = round_cluster(2);
  for (double* rate :
       {&cluster.peers.bytes_per_second, &cluster.network.bytes_per_second, &cluster.host.bytes_per_second,
        &cluster.switch_bytes_per_second, &cluster.host_memory_bytes_per_second}) {
    *rate = 200 * std::pow(100, random.uniform());
  }
  cluster.ranks_per_switch = 1 + static_cast<int>(random.below(2));
  return cluster;
}

struct PathCase {
  LoadTable load;
  StepPlan plan;
  CostModel cost;

  SimulatedPhase simulate(Phase phase, PathChoice path) const {
    return simulate_phase({.load = load, .plan = plan, .cost = cost}, {.phase = phase, .path = path});
  }
};

PathCase random_case(Random& random, Residency residency, int ranks_per_node) {
  sim_test::LoadShape shape = kShape;
  shape.ranks_per_node = ranks_per_node;
  LoadTable load = random_load(shape, random);
  ThreadPool pool(1);
  const auto homes = contiguous_homes(shape.layers, shape.experts, shape.ranks);
  const PlannerOptions options{.guest_slots = 1, .residency = residency};
  StepPlan plan = plan_step({.load = load, .home = homes, .options = options}, pool).plan;
  Cluster cluster = random_cluster(random);
  cluster.ranks_per_node = ranks_per_node;
  return {std::move(load), std::move(plan), {cluster, round_model(shape.layers, shape.experts), round_options()}};
}

TEST(SimulatedPathsTest, BothPathsTogetherAreNeverSlowerThanOneAlone) {
  Random random(3);
  std::map<PathChoice, int> chosen;
  for (int trial = 0; trial < 120; ++trial) {
    const auto residency =
        std::array{Residency::kStatic, Residency::kResident, Residency::kShared, Residency::kFree}[trial % 4];
    const PathCase c = random_case(random, residency, /*ranks_per_node=*/trial % 2 == 0 ? 2 : 4);
    for (const Phase phase : {Phase::kRecompute, Phase::kPolicyUpdate}) {
      const SimulatedPhase both = c.simulate(phase, PathChoice::kAuto);
      EXPECT_LE(both.seconds, c.simulate(phase, PathChoice::kPeer).seconds) << "trial " << trial;
      EXPECT_LE(both.seconds, c.simulate(phase, PathChoice::kHost).seconds) << "trial " << trial;
      ++chosen[both.path];
    }
  }
  for (const PathChoice path : {PathChoice::kAuto, PathChoice::kHost, PathChoice::kPeer}) {
    EXPECT_GT(chosen[path], 0) << "the cases show nothing: " << to_string(path) << " " << chosen[path];
  }
}

TEST(SimulatedPathsThread, TheEngineMovesTheBytesOfEitherPathThatAreSimulated) {
  Random random(8);
  std::int64_t by_host = 0;
  for (int trial = 0; trial < 12; ++trial) {
    const PathCase c = random_case(random, Residency::kShared, /*ranks_per_node=*/4);
    const SimulatedPhase phase = c.simulate(Phase::kRecompute, PathChoice::kAuto);
    // The engine's caller has the plan, the cluster and the path that the simulator chose.
    const ExpertLayout layout(
        {{.name = "w", .elements = c.cost.expert_weights().value / 2, .type = DataType::kBfloat16}});
    const test::ClusterShape shape{.ranks = 4, .ranks_per_node = 4, .micro_steps = 8, .layers = 2, .experts = 8};
    test::Cluster engines(
        shape, make_transfer_schedule(c.plan, layout, {.path = phase.path, .cluster = &c.cost.cluster()}), layout);
    std::vector<std::unique_ptr<test::ClusterRank>> ranks;
    for (int r = 0; r < shape.ranks; ++r) ranks.push_back(std::make_unique<test::ClusterRank>(engines, RankId{r}));
    {
      std::vector<std::jthread> threads;
      for (auto& rank : ranks) threads.emplace_back([&rank] { rank->run(); });
    }
    Bytes host;
    Bytes peer;
    for (const auto& rank : ranks) {
      host += rank->engine().figures().host_bytes;
      peer += rank->engine().figures().peer_bytes;
    }
    EXPECT_EQ(phase.traffic[0].link, "peers");
    EXPECT_EQ(phase.traffic[4].link, "host memory");
    EXPECT_EQ(peer, phase.traffic[0].copies);
    EXPECT_EQ(host, phase.traffic[4].copies - phase.arena);  // the node's arena is filled once
    by_host += host.value;
  }
  EXPECT_GT(by_host, 0) << "the cases show nothing";
}

}  // namespace
}  // namespace foremoe
