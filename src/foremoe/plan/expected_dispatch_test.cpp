#include "foremoe/plan/expected_dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/testing/batched_traces.h"
#include "foremoe/testing/simulated_plans.h"

namespace foremoe {
namespace {

struct Shape {
  int tokens = 0;  // of each rank
  int ranks = 0;
  int ranks_per_node = 0;
  int experts = 0;
  int top_k = 0;
  double spread = 0;  // of scores
  ExpertGroups groups;
};

// A token's experts: the best by score, from the groups whose two best experts score best.
std::vector<std::uint8_t> choose(const std::vector<double>& score, const Shape& shape) {
  const std::size_t size = score.size() / static_cast<std::size_t>(shape.groups.count);
  std::vector<std::pair<double, std::size_t>> of_group;
  for (std::size_t g = 0; g * size < score.size(); ++g) {
    std::vector<double> of(score.begin() + static_cast<std::ptrdiff_t>(g * size),
                           score.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
    std::ranges::sort(of, std::greater<>{});
    of_group.emplace_back(of[0] + of[1], g);
  }
  std::ranges::sort(of_group, std::greater<>{});
  std::vector<std::pair<double, std::uint8_t>> experts;
  for (int i = 0; i < shape.groups.per_token; ++i) {
    const std::size_t g = of_group[static_cast<std::size_t>(i)].second;
    for (std::size_t e = g * size; e < (g + 1) * size; ++e)
      experts.emplace_back(score[e], static_cast<std::uint8_t>(e));
  }
  std::ranges::sort(experts, std::greater<>{});
  std::vector<std::uint8_t> chosen;
  for (int j = 0; j < shape.top_k; ++j) chosen.push_back(experts[static_cast<std::size_t>(j)].second);
  return chosen;
}

// One micro-step and layer; tokens differ by chance alone, sources by what is popular there.
test::BatchedTrace draw(const Shape& shape, Random& random) {
  const auto gumbel = [&] { return -std::log(-std::log(std::max(random.uniform(), 1e-12))); };
  test::BatchedTrace result;
  result.batching = {.num_micro_steps = 1, .num_ranks = shape.ranks, .ranks_per_node = shape.ranks_per_node};
  RoutingTrace trace{.num_layers = 1, .top_k = shape.top_k, .num_experts = shape.experts, .cu_seqlens = {0}};
  std::vector<std::uint8_t> routes;
  for (int r = 0; r < shape.ranks; ++r) {
    result.batching.micro_step.emplace_back(0);
    result.batching.rank.emplace_back(r);
    trace.cu_seqlens.push_back(trace.cu_seqlens.back() + shape.tokens);
    std::vector<double> popular;
    for (int e = 0; e < shape.experts; ++e) popular.push_back(shape.spread * gumbel());
    for (int t = 0; t < shape.tokens; ++t) {
      std::vector<double> score;
      for (const double p : popular) score.push_back(p + gumbel());
      const std::vector<std::uint8_t> chosen = choose(score, shape);
      routes.insert(routes.end(), chosen.begin(), chosen.end());
    }
  }
  result.trace = test::trace_of(std::move(routes), trace);
  result.load = test::load_of(result.trace, result.batching);
  return result;
}

// Homes, and replicas on some ranks that take a part of an expert's rows.
StepPlan split(const LoadTable& load, Random& random) {
  StepPlan plan = sim_test::homes_plan(load, 1);
  const int homes = load.num_experts() / load.num_ranks();
  for (int r = 0; r < load.num_ranks(); ++r) {
    const ExpertId e{random.below(static_cast<std::uint64_t>(load.num_experts()))};
    const int home = e.value / homes;
    Tokens& left = plan.slot_tokens(0, 0, home, e.value % homes);
    if (home == r) continue;
    const Tokens part{left.value / 2};
    left -= part;
    plan.slot_expert(0, 0, r, homes) = e;
    plan.slot_tokens(0, 0, r, homes) = part;
  }
  return plan;
}

std::int64_t sum(const Array<Tokens, 2>& rows) {
  std::int64_t total = 0;
  for (const Tokens n : rows.flat()) total += n.value;
  return total;
}

struct Both {
  TokenDispatch counted;
  TokenDispatch expected;
  RoutedLayer routed;
};

Both dispatch_both(const test::BatchedTrace& drawn, const StepPlan& plan, const ExpertGroups& groups) {
  const LoadTable& load = drawn.load;
  const Topology topology{.num_ranks = load.num_ranks(), .ranks_per_node = drawn.batching.ranks_per_node};
  const RoutingProblem problem{
      .load = load.load[0][0], .quotas = layer_quotas(plan, EventId{0}, LayerId{0}), .topology = topology};
  const SourceTokens tokens(drawn.trace, drawn.batching);
  Both both{.counted = {}, .expected = {}, .routed = route_tokens(problem)};
  both.counted = token_dispatch(both.routed, {tokens, MicroStepId{0}, LayerId{0}, topology});
  both.expected = expected_token_dispatch(
      both.routed, {.load = problem.load, .top_k = load.top_k, .groups = groups, .topology = topology});
  return both;
}

class ExpectedDispatchTest : public testing::TestWithParam<Shape> {};

TEST_P(ExpectedDispatchTest, IsWhatIsCountedWhereTokensAreDrawnAlike) {
  const Shape& shape = GetParam();
  Random random(3);
  for (int trial = 0; trial < 3; ++trial) {
    const test::BatchedTrace drawn = draw(shape, random);
    for (const bool splits : {false, true}) {
      const StepPlan plan = splits ? split(drawn.load, random) : sim_test::homes_plan(drawn.load, 1);
      const Both both = dispatch_both(drawn, plan, shape.groups);
      const auto ranks = static_cast<double>(sum(both.counted.to_rank));
      const auto nodes = static_cast<double>(sum(both.counted.to_node));
      EXPECT_NEAR(static_cast<double>(sum(both.expected.to_rank)) / ranks, 1, 0.02) << splits << trial;
      EXPECT_NEAR(static_cast<double>(sum(both.expected.to_node)) / nodes, 1, 0.02) << splits << trial;
    }
  }
}

TEST_P(ExpectedDispatchTest, SendsToAPlaceAsMuchAsItsBusiestExpertAndNoMoreThanAllOfThem) {
  const Shape& shape = GetParam();
  Random random(5);
  const test::BatchedTrace drawn = draw(shape, random);
  const StepPlan plan = split(drawn.load, random);
  const Both both = dispatch_both(drawn, plan, shape.groups);
  const Array<Tokens, 2> all = dispatch_table(both.routed);
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  Array<Tokens, 2> busiest({ranks, ranks});
  for (const Shipment& s : both.routed.shipments) {
    busiest(s.source, s.replica) = std::max(busiest(s.source, s.replica), s.rows);
  }
  for (std::size_t s = 0; s < ranks; ++s) {
    Tokens to_ranks;
    for (std::size_t d = 0; d < ranks; ++d) {
      EXPECT_GE(both.expected.to_rank(s, d), busiest(s, d)) << s << " " << d;
      EXPECT_LE(both.expected.to_rank(s, d), all(s, d)) << s << " " << d;
      to_ranks += both.expected.to_rank(s, d);
    }
    Tokens to_nodes;
    for (const Tokens n : both.expected.to_node.row(s)) {
      EXPECT_LE(n.value, shape.tokens);
      to_nodes += n;
    }
    EXPECT_LE(to_nodes, to_ranks);
    EXPECT_GE(to_nodes.value, shape.tokens);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ExpectedDispatchTest,
    testing::Values(Shape{.tokens = 2000, .ranks = 8, .ranks_per_node = 4, .experts = 32, .top_k = 4, .spread = 0.5},
                    Shape{.tokens = 2000, .ranks = 8, .ranks_per_node = 2, .experts = 64, .top_k = 8, .spread = 1},
                    Shape{.tokens = 2000, .ranks = 6, .ranks_per_node = 4, .experts = 12, .top_k = 2, .spread = 0.3},
                    Shape{.tokens = 2000,
                          .ranks = 8,
                          .ranks_per_node = 2,
                          .experts = 64,
                          .top_k = 8,
                          .spread = 0.5,
                          .groups = {.count = 4, .per_token = 2}}));

TEST(ExpectedDispatch, OfOneExpertPerTokenIsTheDispatchTable) {
  Random random(9);
  const test::BatchedTrace drawn =
      draw({.tokens = 300, .ranks = 4, .ranks_per_node = 2, .experts = 16, .top_k = 1, .spread = 1}, random);
  const Both both = dispatch_both(drawn, split(drawn.load, random), {});
  EXPECT_EQ(both.expected.to_rank, dispatch_table(both.routed));
  EXPECT_EQ(both.expected.to_rank, both.counted.to_rank);
  EXPECT_EQ(both.expected.to_node, both.counted.to_node);
}

TEST(ExpectedDispatch, OfASourceWithoutTokensIsNothing) {
  Random random(9);
  test::BatchedTrace drawn =
      draw({.tokens = 50, .ranks = 4, .ranks_per_node = 2, .experts = 16, .top_k = 2, .spread = 1}, random);
  std::ranges::fill(drawn.load.load[0][0].row(1), Tokens{0});
  const StepPlan plan = sim_test::homes_plan(drawn.load, 1);
  const Topology topology{.num_ranks = 4, .ranks_per_node = 2};
  const RoutedLayer routed = route_tokens(
      {.load = drawn.load.load[0][0], .quotas = layer_quotas(plan, EventId{0}, LayerId{0}), .topology = topology});
  const TokenDispatch expected =
      expected_token_dispatch(routed, {.load = drawn.load.load[0][0], .top_k = 2, .groups = {}, .topology = topology});
  for (const Tokens n : expected.to_rank.row(1)) EXPECT_EQ(n, Tokens{0});
  for (const Tokens n : expected.to_node.row(1)) EXPECT_EQ(n, Tokens{0});
  EXPECT_GT(expected.to_node(0, 1), Tokens{0});
}

}  // namespace
}  // namespace foremoe
