// Gradients and weights of experts over the expert-parallel groups of a job.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "foremoe/testing/simulated_steps.h"

namespace foremoe {
namespace {

using sim_test::homes_plan;
using sim_test::kNear;
using sim_test::one_layer;
using sim_test::OneCopy;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;
using sim_test::Simulated;

// Of an expert in float32 and bf16. A rank has one expert.
constexpr double kGradient = 1200;
constexpr double kWeights = 600;
constexpr double kBandwidth = 8000;
constexpr double kRowBytes = 20;

CostOptions of_groups(int groups) {
  CostOptions options = round_options();
  options.ep_groups = groups;
  return options;
}

// Equal layers on two ranks of one node. Rank 0 has 100 tokens, rank 1 has 40; 40 and 30 rows leave their ranks.
LoadTable equal_layers(int layers) {
  const LoadTable one = one_layer({{{60, 40}, {30, 10}}, {{60, 40}, {30, 10}}});
  LoadTable load = one;
  load.load = Array<Tokens, 4>({2, static_cast<std::size_t>(layers), 2, 2});
  for (int m = 0; m < 2; ++m) {
    for (int l = 0; l < layers; ++l) std::ranges::copy(one.load[m][0].flat(), load.load[m][l].data());
  }
  return load;
}

SimulatedPhase update(const LoadTable& load, const CostOptions& options, const Cluster& cluster = round_cluster(),
                      int model_layers = 0) {
  const StepPlan plan = homes_plan(load, 0);
  const int layers = model_layers != 0 ? model_layers : load.num_layers();
  return Simulated{load, plan, {cluster, round_model(layers, 2), options}}.phase(Phase::kPolicyUpdate);
}

// Seconds of one layer's backward without the parts of the model that belong to the first layer.
double backward(const CostModel& cost) {
  // The forward's dispatch and combine again, then the backward's: four exchanges of 40 rows. 90 rows per expert.
  const double exchanges = 4 * 40 * kRowBytes / kBandwidth;
  const Tokens rows{90};
  return cost.dense(Tokens{100}, Pass::kBackward) + exchanges + cost.experts({&rows, 1}, Pass::kBackward);
}

TEST(DataParallelTest, OneLayersReductionIsExposedAndFollowedByTheGatheringOfWeights) {
  const LoadTable load = equal_layers(1);
  EXPECT_NEAR(update(load, of_groups(2)).parts.data_parallel, (kGradient / 2 + kWeights / 2) / kBandwidth, kNear)
      << "reduce-scatter and all-gather: each rank sends half";
  CostOptions whole = of_groups(4);
  whole.optimizer_shards = 1;
  EXPECT_NEAR(update(load, whole).parts.data_parallel, 2 * 0.75 * kGradient / kBandwidth, kNear) << "an all-reduce";
  CostOptions pairs = of_groups(4);
  pairs.optimizer_shards = 2;
  EXPECT_NEAR(update(load, pairs).parts.data_parallel, (kGradient / 2 + kGradient / 2 + kWeights / 2) / kBandwidth,
              kNear)
      << "reduce-scatter over two ranks, all-reduce of half the gradient over two, all-gather over two";
  Cluster late = round_cluster();
  late.network.latency_seconds = 0.5;
  EXPECT_NEAR(update(load, of_groups(4), late).parts.data_parallel,
              0.75 * (kGradient + kWeights) / kBandwidth + 6 * 0.5, kNear)
      << "three steps each";
}

TEST(DataParallelTest, AReductionOverlapsWithTheBackwardOfEarlierLayersInTheLastMicroStep) {
  constexpr int kLayers = 3;
  const LoadTable load = equal_layers(kLayers);
  const CostModel cost(round_cluster(), round_model(kLayers, 2), of_groups(2));
  const double layer = backward(cost);
  Cluster cluster = round_cluster();
  for (const double times : {0.5, 0.9, 1.5, 4.0}) {  // a layer's reduction ÷ its backward
    const double ring = times * layer;
    cluster.network.bytes_per_second = kGradient / 2 / ring;
    const double others = cost.other_layers(Tokens{100}, Pass::kBackward);  // beside the first layer's backward
    const double waiting = std::max(ring, 2 * ring - layer);                // when the first layer's backward begins
    const double exposed = std::max(0.0, waiting - layer - others) + ring;
    CostOptions far = of_groups(2);
    far.shares_uplink = false;
    EXPECT_NEAR(update(load, far, cluster).parts.data_parallel, exposed + kLayers * kWeights / 2 * ring / 600, kNear)
        << times;
  }
}

TEST(DataParallelTest, ExchangesOfRowsHaveTheirLinksToThemselves) {
  constexpr int kLayers = 2;
  const LoadTable load = equal_layers(kLayers);
  CostOptions near = of_groups(2);
  near.groups_share_node = true;  // rows and gradients use the same links
  near.bytes_per_gradient = 400;  // 120,000 bytes, longer than a layer's backward
  const CostModel cost(round_cluster(), round_model(kLayers, 2), near);
  const double ring = 300 * 400 / 2 / kBandwidth;
  // Rank 0 sends 40 rows and receives 30. Exchanges alternate directions: two leave 10 rows' time on each link, and the
  // links that carry 40 rows leave nothing.
  const double rows = 2 * (40 + 30) * kRowBytes / kBandwidth;
  const double free = backward(cost) + cost.other_layers(Tokens{100}, Pass::kBackward) - rows;
  ASSERT_GT(ring, free);
  EXPECT_NEAR(update(load, near).parts.data_parallel, 2 * ring - free + kLayers * kWeights / 2 / kBandwidth, kNear);
}

TEST(DataParallelTest, MoreGroupsOrBytesAreNeverFasterAndOneGroupReducesNothing) {
  const LoadTable load = equal_layers(3);
  double before = 0;
  for (const int groups : {1, 2, 4, 8, 64}) {
    CostOptions options = of_groups(groups);
    const SimulatedPhase phase = update(load, options);
    EXPECT_EQ(phase.parts.data_parallel > 0, groups > 1);
    EXPECT_GE(phase.parts.data_parallel, before);
    before = phase.parts.data_parallel;
    options.bytes_per_gradient *= 2;
    EXPECT_GE(update(load, options).parts.data_parallel, before);
  }
}

TEST(DataParallelTest, CopiesAndGuestsGradientsDoNotWaitForIt) {
  const OneCopy step;
  Cluster cluster = round_cluster();
  cluster.peers.bytes_per_second = 100;
  const auto simulated = [&](const CostOptions& options, Phase phase) {
    const CostModel cost(cluster, round_model(1, 2), options);
    return Simulated{step.load, step.plan, cost}.phase(phase, {.path = PathChoice::kPeer});
  };
  CostOptions near = of_groups(4);
  near.groups_share_node = true;
  const SimulatedPhase alone = simulated(round_options(), Phase::kPolicyUpdate);
  const SimulatedPhase shared = simulated(near, Phase::kPolicyUpdate);
  ASSERT_GT(alone.parts.exposed_gradients, 0);
  for (const PhasePart& part : phase_parts()) {
    if (part.name == "data_parallel" || part.name == "optimizer") continue;
    EXPECT_EQ(shared.parts.*part.seconds, alone.parts.*part.seconds) << part.name;
  }
  const double lone = 0.75 * (kGradient + kWeights) / cluster.peers.bytes_per_second;
  EXPECT_NEAR(shared.parts.data_parallel, lone, kNear) << "after the guest's gradient";
  EXPECT_EQ(simulated(near, Phase::kRecompute).parts.data_parallel, 0);
  const std::int64_t sent = 2 * std::llround(0.75 * (kGradient + kWeights));  // by two ranks
  EXPECT_EQ(shared.traffic[0].gradients - alone.traffic[0].gradients, Bytes{sent});
}

TEST(DataParallelTest, ALayerThatRepresentsSeveralIsReducedLikeThem) {
  constexpr int kLayers = 4;
  Cluster cluster = round_cluster();
  for (const double bandwidth : {8000.0, 400.0, 100.0}) {
    cluster.network.bytes_per_second = bandwidth;
    const SimulatedPhase all = update(equal_layers(kLayers), of_groups(2), cluster);
    const SimulatedPhase one = update(equal_layers(1), of_groups(2), cluster, kLayers);
    const double layer = backward({cluster, round_model(kLayers, 2), of_groups(2)});
    EXPECT_LE(one.parts.data_parallel, all.parts.data_parallel + kNear);
    EXPECT_GE(one.parts.data_parallel, all.parts.data_parallel - layer - kNear);
  }
}

}  // namespace
}  // namespace foremoe
