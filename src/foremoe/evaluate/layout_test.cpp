#include "foremoe/evaluate/layout_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/testing/simulated_plans.h"

namespace foremoe {
namespace {

using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

// One micro-step of two MoE layers on four ranks in nodes of two, with two experts.
LoadTable small_load() {
  LoadTable load{.load = Array<Tokens, 4>({1, 2, 4, 2}), .top_k = 1, .ranks_per_node = 2, .name = "small"};
  const std::int64_t rows[] = {6, 4, 3, 7, 15, 5,  12, 8,    // layer 0
                               2, 8, 5, 5, 10, 10, 4,  16};  // layer 1
  std::ranges::transform(rows, load.load.flat().begin(), [](std::int64_t n) { return Tokens{n}; });
  return load;
}

CostModel small_cost(int vocabulary = 6) {
  Cluster cluster = round_cluster(2);
  cluster.network.bytes_per_second = 4000;
  ModelShape model = round_model(2, 2);
  model.dense_layers = 1;
  model.dense_intermediate = 7;
  model.vocabulary = vocabulary;
  return {cluster, model, round_options()};
}

LoadTable random_load() {
  Random random(7);
  return sim_test::random_load({.micro_steps = 3, .layers = 2, .ranks = 8, .experts = 8, .ranks_per_node = 4}, random);
}

// Links are so fast that plans pay.
CostModel random_cost() {
  Cluster cluster = round_cluster(4);
  for (LinkSpeed* link : {&cluster.peers, &cluster.network, &cluster.host}) link->bytes_per_second = 1e6;
  return {cluster, round_model(4, 8), round_options()};
}

// Unlike make_workload(), does not need equally many experts on all ranks.
Workload workload_of(const LoadTable& load) {
  Workload whole;
  whole.load = load;
  return whole;
}

LayoutChoice choose(const LoadTable& load, const CostModel& cost, double budget_bytes = 1e6, std::size_t threads = 1) {
  ThreadPool pool(threads);
  EvaluateOptions options;
  options.memory_budget_gigabytes = budget_bytes / 1e9;
  return choose_layout(workload_of(load), options, {.pool = pool, .cost = &cost});
}

const LayoutResult& result_of(const LayoutChoice& choice, int ep, int stages) {
  return *std::ranges::find_if(choice.layouts, [&](const LayoutResult& result) {
    return result.layout.ep == ep && result.layout.stages == stages;
  });
}

// Two stages of two ranks: a stage is a node, and an expert-parallel group. The batches of ranks 2 and 3 are the second
// micro-step of ranks 0 and 1. Only arithmetic and links take time: 60,000 operations and 8,000 bytes per second, 4,000
// between nodes.
class TwoStages : public testing::TestWithParam<int> {};  // vocabulary: the large head makes the last stage the slowest
INSTANTIATE_TEST_SUITE_P(Layout, TwoStages, testing::Values(6, 60));

TEST_P(TwoStages, TakeAsLongAsComputedByHand) {
  // Forward operations per token: projections of 40 parameters, scores 4, router of 20 parameters, the dense layer's
  // feed-forward of 210, the head of 10 · vocabulary. A backward repeats the forward and has twice the operations, of
  // scores 2.5 times as many.
  const double moe_layer = 2 * 40 + 4 + 2 * 20;
  const double dense_layer = 2 * 40 + 4 + 2 * 210;
  const double head = 2 * 10 * GetParam();
  const double of_scores = 0.5 * 4;
  const double tokens = 10 + 20;  // of a rank in both micro-steps
  const double dense_0 = (moe_layer + dense_layer) * tokens / 60'000;
  const double dense_1 = (moe_layer + head) * tokens / 60'000;
  const double dense_0_back = 3 * dense_0 + 2 * of_scores * tokens / 60'000;
  const double dense_1_back = 3 * dense_1 + of_scores * tokens / 60'000;
  // The slowest rank computes 11 and 27 rows of layer 0, 13 and 26 of layer 1, 100 in a second. The busiest link
  // carries 4 and 12 rows of layer 0, 8 and 10 of layer 1, 400 in a second. A forward has two exchanges, a backward
  // four.
  const double experts_0 = (11 + 27) / 100.0;
  const double experts_1 = (13 + 26) / 100.0;
  const double exchange_0 = (4 + 12) / 400.0;
  const double exchange_1 = (8 + 10) / 400.0;
  const double forward_0 = dense_0 + experts_0 + 2 * exchange_0;
  const double forward_1 = dense_1 + experts_1 + 2 * exchange_1;
  const double update_0 = forward_0 + dense_0_back + 3 * experts_0 + 4 * exchange_0;
  const double update_1 = forward_1 + dense_1_back + 3 * experts_1 + 4 * exchange_1;
  // Activations of 15 tokens on average, 10 elements of 2 bytes, go to the other node.
  const double transfer = 15 * 10 * 2 / 4000.0;
  const int turns = 2 + 2 - 1;  // micro-steps + stages − 1
  const double recompute = (std::max(forward_0, forward_1) / 2 + transfer) * turns;
  const double update = (std::max(update_0, update_1) / 2 + 2 * transfer) * turns;
  if (GetParam() == 6) {
    EXPECT_NEAR(recompute + update, 6.363, 5e-4);
  }

  const LayoutResult found = result_of(choose(small_load(), small_cost(GetParam())), 2, 2);
  EXPECT_EQ(found.micro_steps, 2);
  EXPECT_EQ(found.layout.groups, 1);
  EXPECT_NEAR(found.unplanned.seconds, recompute + update, 1e-9);
}

TEST(Layout, MemoryOfTwoStagesEqualsAComputationByHand) {
  // Stage 0 has the most: an expert of 300 parameters, and 370 that both ranks share: two layers of attention, a
  // router, the dense layer, the embedding. 6 bytes of weights and gradients, 12 of optimizer state. Two micro-steps of
  // 10 + 20 tokens are in flight, with 20 bytes per token and layer. The running layer has 27 rows, with 200 bytes.
  const int state = (300 + 370) * 6 + 300 * 12 + 370 * 12 / 2;
  const LayoutResult found = result_of(choose(small_load(), small_cost()), 2, 2);
  EXPECT_EQ(found.unplanned.memory.value, state + 30 * 20 * 2 + 27 * 200);
}

TEST(Layout, OneStageTakesAsLongAsItsSlowestGroup) {
  const LoadTable load = random_load();
  const LayoutChoice choice = choose(load, random_cost());
  for (const int ep : {2, 4, 8}) {
    CostOptions options = random_cost().options();
    options.ep_groups = 8 / ep;
    const CostModel cost(random_cost().cluster(), random_cost().model(), options);
    ThreadPool pool(1);
    double slowest = 0;
    for (const Workload& group : split_groups(make_workload(load), ep)) {
      slowest = std::max(
          slowest, evaluate(policy_named("vanilla"), group, {}, {.pool = pool, .cost = &cost}).step->step_seconds);
    }
    EXPECT_NEAR(result_of(choice, ep, 1).unplanned.seconds, slowest, 1e-9 * slowest) << ep;
  }
}

// The second of four stages has three dense layers. If the input has one
// layer for all, it is found to be the slowest as it is if the input has all layers, which are equal.
TEST(Layout, AStageInTheMiddleMayBeTheSlowest) {
  const LoadTable all = random_load();
  const LoadTable one = take_layers(all, 0, 1);
  LoadTable four = all;
  four.load = Array<Tokens, 4>({3, 4, 8, 8});
  for (std::size_t i = 0; i < 3 * 4; ++i) {
    std::ranges::copy(one.load.flat().subspan(i / 4 * 64, 64), four.load.flat().subspan(i * 64).begin());
  }
  ModelShape model = round_model(4, 8);
  model.dense_layers = 3;
  model.dense_intermediate = 700;
  using enum LayerKind;
  model.layer_kinds = {kMoe, kDense, kDense, kDense, kMoe, kMoe, kMoe};
  const CostModel cost(random_cost().cluster(), model, round_options());
  const LayoutResult of_one = result_of(choose(one, cost), 2, 4);
  const LayoutResult of_four = result_of(choose(four, cost), 2, 4);
  EXPECT_NEAR(of_one.unplanned.seconds, of_four.unplanned.seconds, 1e-9 * of_four.unplanned.seconds);
  EXPECT_EQ(of_one.unplanned.memory, of_four.unplanned.memory);
}

TEST(Layout, LayoutsDivideRanksExpertsAndNodes) {
  const auto names = [](int ranks, int per_node, int layers, int experts) {
    std::vector<std::string> all;
    for (const JobLayout& l :
         layouts_of({.num_ranks = ranks, .ranks_per_node = per_node}, round_model(layers, experts))) {
      EXPECT_EQ(l.ep * l.stages * l.groups, ranks);
      all.push_back(std::to_string(l.ep) + "x" + std::to_string(l.stages));
    }
    return all;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(8, 4, 6, 8), (Names{"1x1", "2x1", "4x1", "8x1", "1x2", "2x2", "4x2", "1x4", "2x4"}));
  EXPECT_EQ(names(24, 8, 3, 12), (Names{"1x1", "2x1", "4x1", "1x2", "2x2", "4x2", "1x3", "2x3", "4x3"}));
  EXPECT_EQ(names(4, 4, 5, 7), (Names{"1x1", "1x2", "1x4"}));
  EXPECT_THROW(names(12, 8, 4, 8), InputError);
}

TEST(Layout, MoreMemoryNeverMakesTheBestSlower) {
  std::vector<double> needed;
  for (const LayoutResult& result : choose(random_load(), random_cost()).layouts) {
    needed.push_back(static_cast<double>(result.unplanned.memory.value));
  }
  std::ranges::sort(needed);
  double before = 1e9;
  for (const double bytes : needed) {
    const double seconds = choose(random_load(), random_cost(), bytes + 1).best_step().seconds;
    EXPECT_LE(seconds, before) << bytes;
    before = seconds;
  }
}

TEST(Layout, PlansAreFasterThanNoPlanAndWithinMemory) {
  const LayoutChoice all = choose(random_load(), random_cost());
  const auto bytes = static_cast<double>(result_of(all, 8, 1).unplanned.memory.value);
  const LayoutChoice choice = choose(random_load(), random_cost(), 1.2 * bytes);  // too little for small groups
  ASSERT_TRUE(choice.planned);
  EXPECT_LT(choice.best_step().seconds, choice.layouts[*choice.unplanned].unplanned.seconds);
  EXPECT_LE(choice.best_step().memory, choice.limit);
  for (const LayoutResult& result : choice.layouts) EXPECT_EQ(result.planned.has_value(), result.not_planned.empty());
}

TEST(Layout, TheNumberOfThreadsDoesNotChangeTheResult) {
  const auto json = [](std::size_t threads) {
    const LoadTable load = random_load();
    return to_json(choose(load, random_cost(), 1e6, threads), workload_of(load), random_cost()).dump();
  };
  EXPECT_EQ(json(1), json(2));
}

TEST(Layout, NamesTheLeastMemoryIfNothingFits) {
  try {
    choose(small_load(), small_cost(), 5000);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(error.problem().find("the least is"), std::string::npos) << error.problem();
  }
}

}  // namespace
}  // namespace foremoe
