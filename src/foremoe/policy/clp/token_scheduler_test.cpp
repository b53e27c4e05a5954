// Compares FineMoE's linear programs with examples worked by hand, our exact assignment and all sets of ranks. Tests
// the rounding of their solutions to whole tokens.

#include "foremoe/policy/systems/finemoe/token_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "foremoe/testing/complete_assignment.h"
#include "foremoe/testing/finemoe_instances.h"

namespace foremoe::finemoe {
namespace {

using Loads = std::vector<std::int64_t>;
using foremoe::test::expect_complete;
using planner::ReplicaGraph;
using test::Holders;
using testing::ElementsAre;

Topology on_one_node(int num_ranks) { return {.num_ranks = num_ranks, .ranks_per_node = num_ranks}; }

double lp_1(const ReplicaGraph& graph, const Loads& load) {
  ReplicaLoadLp lp(graph, on_one_node(graph.num_ranks()), std::nullopt);
  EXPECT_TRUE(lp.solve(test::spread_over_sources(load, graph.num_ranks())));
  EXPECT_NEAR(lp.objective(), lp.largest_rank_load(), 1e-6);
  return lp.objective();
}

std::int64_t exact(const ReplicaGraph& graph, std::span<const std::int64_t> load) {
  planner::Assignment a;
  planner::AssignmentSearch search;
  planner::water_fill(graph, load, a);
  const std::int64_t total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  return planner::assign_tokens(graph, (total + graph.num_ranks() - 1) / graph.num_ranks(), a, search);
}

planner::Assignment schedule(const ReplicaGraph& graph, ArrayView<const std::int64_t, 2> input,
                             const SchedulerOptions& options = {}, int ranks_per_node = 64) {
  planner::Assignment a;
  TokenScheduler({.num_ranks = graph.num_ranks(), .ranks_per_node = ranks_per_node}, options).schedule(graph, input, a);
  return a;
}

// Figure 3: four experts on two groups of two ranks (b), and shuffled to a cycle (c). In the paper, GPU 3 serves 8
// tokens of expert 3, and GPU 0 all 4 tokens of expert 0. We chose the other loads.
const Holders kFigure3b{{0, 2}, {0, 2}, {1, 3}, {1, 3}};
const Holders kFigure3c{{0, 3}, {0, 1}, {1, 2}, {2, 3}};
const Loads kFigure3Load{4, 6, 8, 14};

TEST(ReplicaLoads, AreBalancedInFigure3OnlyIfExpertsConnectAllRanks) {
  EXPECT_NEAR(lp_1(test::graph_of(4, kFigure3b), kFigure3Load), 11, 1e-6);  // only GPUs 1 and 3 hold experts 2 and 3
  EXPECT_NEAR(lp_1(test::graph_of(4, kFigure3c), kFigure3Load), 8, 1e-6);
}

// Figure 5: G_max is {GPU 0, GPU 3}, which hold expert 0 and serve no token of other experts.
TEST(ReplicaLoads, FollowTheLemmaInFigure5) {
  const ReplicaGraph graph = test::graph_of(4, kFigure3c);
  const Loads load{20, 3, 4, 5};
  EXPECT_NEAR(lp_1(graph, load), 10, 1e-6);
  const planner::Assignment a = schedule(graph, test::spread_over_sources(load, 4));
  EXPECT_EQ(a.rank_load[0], 10);
  EXPECT_EQ(a.rank_load[3], 10);
  EXPECT_EQ(a.quota[graph.find(1, 0)], 0);
  EXPECT_EQ(a.quota[graph.find(3, 3)], 0);
}

struct Instance {
  ReplicaGraph graph;
  Array<std::int64_t, 2> input;  // [source][expert]
  Loads load;                    // [expert]
};

Instance random_instance(Random& random, int most_ranks, int most_experts, std::uint64_t most_tokens) {
  const int num_ranks = 1 + static_cast<int>(random.below(most_ranks));
  Holders holders(1 + random.below(most_experts));
  for (auto& of_expert : holders) {
    std::set<int> ranks;
    for (std::uint64_t n = 1 + random.below(random.below(4) == 0 ? num_ranks : 2); n > 0; --n) {
      ranks.insert(static_cast<int>(random.below(num_ranks)));
    }
    of_expert.assign(ranks.begin(), ranks.end());
  }
  Array<std::int64_t, 2> input({static_cast<std::size_t>(num_ranks), holders.size()});
  Loads load(holders.size());
  for (int r = 0; r < num_ranks; ++r) {
    for (std::size_t e = 0; e < holders.size(); ++e) {
      input(r, e) = random.below(3) == 0 ? 0 : static_cast<std::int64_t>(random.below(most_tokens));
      load[e] += input(r, e);
    }
  }
  return {test::graph_of(num_ranks, holders), std::move(input), std::move(load)};
}

std::int64_t up(double tokens) { return static_cast<std::int64_t>(std::ceil(tokens - 1e-5)); }

TEST(ReplicaLoads, HaveOurExactOptimumRoundedUpOnEveryInstance) {
  Random random(1);
  for (int n = 0; n < 400; ++n) {
    const Instance i = random_instance(random, 12, 24, 400);
    const std::int64_t optimum = exact(i.graph, i.load);
    ASSERT_EQ(up(lp_1(i.graph, i.load)), optimum) << "instance " << n;
    const planner::Assignment a = schedule(i.graph, i.input);
    expect_complete(i.graph, i.load, a);
    ASSERT_EQ(std::ranges::max(a.rank_load), optimum) << "instance " << n;
  }
}

TEST(ReplicaLoads, MatchOurExactOptimumForLoadsNearTwoToThe31) {
  Random random(2);
  for (int n = 0; n < 100; ++n) {
    Instance i = random_instance(random, 6, 12, 9);
    std::ranges::fill(i.load, 0);
    for (std::size_t r = 0; r < i.input.extent(0); ++r) {
      for (std::size_t e = 0; e < i.load.size(); ++e) {
        i.input(r, e) = (std::int64_t{1} << 31) - i.input(r, e);
        i.load[e] += i.input(r, e);
      }
    }
    const planner::Assignment a = schedule(i.graph, i.input);
    expect_complete(i.graph, i.load, a);
    ASSERT_EQ(std::ranges::max(a.rank_load), exact(i.graph, i.load)) << "instance " << n;
  }
}

TEST(ReplicaLoads, StayOptimalWarmWhileLoadsAndPlacementsChange) {
  Random random(3);
  TokenScheduler scheduler(on_one_node(10), {});
  planner::Assignment a;
  for (int placement = 0; placement < 10; ++placement) {
    Holders holders(20);
    for (auto& ranks : holders) {
      ranks = {static_cast<int>(random.below(10))};
      ranks.push_back((ranks[0] + 1 + static_cast<int>(random.below(9))) % 10);
    }
    const ReplicaGraph graph = test::graph_of(10, holders);
    for (int n = 0; n < 10; ++n) {
      const Loads load = test::zipf_load(20, 1.0, 5000, random);
      scheduler.schedule(graph, test::spread_over_sources(load, 10), a);
      expect_complete(graph, load, a);
      ASSERT_EQ(std::ranges::max(a.rank_load), test::densest_set(holders, load, 10));
    }
  }
}

TEST(ReplicaLoads, AreEquallyBalancedByTheExactSolver) {
  Random random(4);
  for (int n = 0; n < 100; ++n) {
    const Instance i = random_instance(random, 12, 24, 400);
    const planner::Assignment a = schedule(i.graph, i.input, {.solver = Solver::kExact});
    expect_complete(i.graph, i.load, a);
    ASSERT_EQ(std::ranges::max(a.rank_load), up(lp_1(i.graph, i.load)));
  }
}

TEST(ReplicaLoads, AreZeroWithoutTokens) {
  const ReplicaGraph graph = test::graph_of(4, kFigure3c);
  EXPECT_THAT(schedule(graph, Array<std::int64_t, 2>({4, 4})).rank_load, testing::Each(0));
}

// One expert on two ranks, 6 tokens from rank 0 and 2 from rank 1. Each token above 4 that rank 0 serves itself adds
// one token of computation and saves one of communication.
TEST(CommunicationAware, KeepsMoreTokensLocalWithALargerWeight) {
  const ReplicaGraph graph = test::graph_of(2, {{0, 1}});
  Array<std::int64_t, 2> input({2, 1});
  input(0, 0) = 6;
  input(1, 0) = 2;
  for (const auto& [weight, objective, on_rank_0] : {std::tuple{0.5, 5.0, 4}, {2.0, 6.0, 6}}) {
    ReplicaLoadLp lp(graph, on_one_node(2), CommunicationWeights{.ranks = weight, .nodes = 1});
    ASSERT_TRUE(lp.solve(input));
    EXPECT_NEAR(lp.objective(), objective, 1e-6);
    EXPECT_NEAR(lp.largest_rank_load(), on_rank_0, 1e-6);
    const SchedulerOptions options{.solver = Solver::kCommunicationAware, .weights = {.ranks = weight}};
    EXPECT_EQ(schedule(graph, input, options).rank_load[0], on_rank_0);
  }
}

// One expert on four ranks of two nodes, 8 tokens from rank 0. Each pair of tokens above 4 that node 0 serves itself
// adds one token of computation and saves one token per rank between the nodes.
TEST(CommunicationAware, KeepsMoreTokensOnTheirNodeWithALargerWeight) {
  const ReplicaGraph graph = test::graph_of(4, {{0, 1, 2, 3}});
  Array<std::int64_t, 2> input({4, 1});
  input(0, 0) = 8;
  for (const auto& [weight, objective, on_node_0] : {std::tuple{0.5, 3.0, 4}, {2.0, 4.0, 8}}) {
    const CommunicationWeights weights{.ranks = 0, .nodes = weight};
    ReplicaLoadLp lp(graph, {.num_ranks = 4, .ranks_per_node = 2}, weights);
    ASSERT_TRUE(lp.solve(input));
    EXPECT_NEAR(lp.objective(), objective, 1e-6);
    const auto a = schedule(graph, input, {.solver = Solver::kCommunicationAware, .weights = weights}, 2);
    EXPECT_EQ(a.rank_load[0] + a.rank_load[1], on_node_0);
  }
}

double cost_of(const Instance& i, const planner::Assignment& a, const Topology& topology,
               const CommunicationWeights& weights) {
  const auto ranks = static_cast<std::size_t>(i.graph.num_ranks());
  const auto slots = static_cast<std::size_t>(i.graph.slots_per_rank());
  Array<ExpertId, 2> slot_expert({ranks, slots});
  Array<Tokens, 2> slot_tokens({ranks, slots});
  Array<Tokens, 2> load({ranks, i.load.size()});
  for (int s = 0; s < i.graph.num_slots(); ++s) {
    slot_expert.flat()[s] = ExpertId{i.graph.expert_in(s)};
    slot_tokens.flat()[s] = Tokens{a.quota[s]};
  }
  std::ranges::transform(i.input.flat(), load.flat().begin(), [](std::int64_t tokens) { return Tokens{tokens}; });
  const CommunicationVolume volume = communication_volume(
      route_by_algorithm_1({.load = load, .quotas = {slot_expert, slot_tokens}, .topology = topology}, Locality::kNode),
      topology);
  return static_cast<double>(std::ranges::max(a.rank_load)) + weights.ranks * static_cast<double>(volume.ranks) +
         weights.nodes * static_cast<double>(volume.nodes) / topology.ranks_per_node;
}

// The whole tokens of the LP 4 schedule, routed by algorithm 1, cost at least LP 4's objective and at most num_experts
// + 2 more. LP 1's schedule does not cost less than LP 4's objective.
TEST(CommunicationAware, MatchesTheCostOfRoutedTokens) {
  Random random(5);
  const CommunicationWeights weights;
  for (int n = 0; n < 150; ++n) {
    const Instance i = random_instance(random, 8, 16, 400);
    const Topology topology{.num_ranks = i.graph.num_ranks(), .ranks_per_node = 3};
    ReplicaLoadLp lp(i.graph, topology, weights);
    ASSERT_TRUE(lp.solve(i.input));
    planner::Assignment aware;
    TokenScheduler(topology, {.solver = Solver::kCommunicationAware, .weights = weights})
        .schedule(i.graph, i.input, aware);
    expect_complete(i.graph, i.load, aware);
    EXPECT_GE(cost_of(i, aware, topology, weights), lp.objective() - 1e-4);
    EXPECT_LE(cost_of(i, aware, topology, weights), lp.objective() + i.graph.num_experts() + 2);
    EXPECT_GE(cost_of(i, schedule(i.graph, i.input), topology, weights), lp.objective() - 1e-4);
  }
}

// Two ranks. Experts 0 and 1 are on both, expert 2 only on rank 0. Half of the tokens are first split equally.
TEST(Pipelining, SchedulesTheRestOnTopOfEqualParts) {
  const ReplicaGraph graph = test::graph_of(2, {{0, 1}, {0, 1}, {0}});
  const Loads load{8, 4, 6};
  const auto input = test::spread_over_sources(load, 2);
  const planner::Assignment half = schedule(graph, input, {.scheduled_fraction = 0.5});
  expect_complete(graph, load, half);
  // Equal parts of {4, 2, 2} give rank 0 2 + 1 + 2 tokens. It must serve 4 of the other {4, 2, 4}. Then both have 9.
  EXPECT_THAT(half.rank_load, ElementsAre(9, 9));
  const planner::Assignment none = schedule(graph, input, {.scheduled_fraction = 0});
  expect_complete(graph, load, none);
  EXPECT_THAT(none.rank_load, ElementsAre(4 + 2 + 6, 4 + 2));
}

TEST(Pipelining, BalancesBetterTheMoreTokensAreScheduled) {
  Random random(6);
  for (int n = 0; n < 60; ++n) {
    const Instance i = random_instance(random, 8, 16, 400);
    std::int64_t before = std::numeric_limits<std::int64_t>::max() / 2;
    for (const double fraction : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      std::int64_t loads[2];
      for (const Solver solver : {Solver::kReplicaLoads, Solver::kExact}) {
        const auto a = schedule(i.graph, i.input, {.solver = solver, .scheduled_fraction = fraction});
        expect_complete(i.graph, i.load, a);
        loads[solver == Solver::kExact ? 1 : 0] = std::ranges::max(a.rank_load);
      }
      ASSERT_EQ(loads[0], loads[1]) << "instance " << n;
      ASSERT_LE(loads[0], before + i.graph.num_experts());  // smaller equal parts round differently
      before = loads[0];
    }
  }
}

}  // namespace
}  // namespace foremoe::finemoe
