#include "foremoe/plan/expected_dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/testing/batched_traces.h"

namespace foremoe {
namespace {

struct Shape {
  int tokens = 0;  // per rank
  int ranks = 0;
  int ranks_per_node = 0;
  int experts = 0;
  int top_k = 0;
  double spread = 0;  // of scores
  ExpertGroups groups;
};

// A token chooses the experts with the best scores from the groups with the highest sums of their two best scores.
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

// One micro-step and layer. Sources differ in which experts are popular; tokens of a source differ by chance only.
test::CountedTrace draw(const Shape& shape, Random& random) {
  const auto gumbel = [&] { return -std::log(-std::log(std::max(random.uniform(), 1e-12))); };
  test::CountedTrace result;
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

// Experts and quotas in the slots of the only layer.
struct Slots {
  Array<ExpertId, 2> expert;  // [rank][slot]
  Array<Tokens, 2> tokens;

  LayerQuotas quotas() const { return {.slot_expert = expert, .slot_tokens = tokens}; }
};

// Each expert is only at home, in contiguous blocks, and serves all of its rows. Each rank has one empty guest slot.
Slots at_home(const LoadTable& load) {
  const auto ranks = static_cast<std::size_t>(load.num_ranks());
  const std::size_t homes = static_cast<std::size_t>(load.num_experts()) / ranks;
  Slots slots{.expert = Array<ExpertId, 2>({ranks, homes + 1}, kNoExpert),
              .tokens = Array<Tokens, 2>({ranks, homes + 1})};
  for (std::size_t e = 0; e < ranks * homes; ++e) {
    slots.expert(e / homes, e % homes) = ExpertId{e};
    for (std::size_t s = 0; s < ranks; ++s) slots.tokens(e / homes, e % homes) += load.load(0, 0, s, e);
  }
  return slots;
}

// Moves half of the rows of some experts to a guest.
Slots split(const LoadTable& load, Random& random) {
  Slots slots = at_home(load);
  const std::size_t homes = slots.expert.extent(1) - 1;
  for (std::size_t r = 0; r < slots.expert.extent(0); ++r) {
    const ExpertId e{random.below(static_cast<std::uint64_t>(load.num_experts()))};
    if (e.index() / homes == r) continue;
    Tokens& left = slots.tokens(e.index() / homes, e.index() % homes);
    const Tokens part{left.value / 2};
    left -= part;
    slots.expert(r, homes) = e;
    slots.tokens(r, homes) = part;
  }
  return slots;
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

Both dispatch_both(const test::CountedTrace& drawn, const Slots& slots, const ExpertGroups& groups) {
  const LoadTable& load = drawn.load;
  const Topology topology{.num_ranks = load.num_ranks(), .ranks_per_node = drawn.batching.ranks_per_node};
  const RoutingProblem problem{.load = load.load[0][0], .quotas = slots.quotas(), .topology = topology};
  const SourceTokens tokens(drawn.trace, drawn.batching);
  Both both{.counted = {}, .expected = {}, .routed = route_tokens(problem)};
  both.counted = token_dispatch(both.routed, {tokens, MicroStepId{0}, LayerId{0}, topology});
  both.expected = expected_token_dispatch(
      both.routed, {.load = problem.load, .top_k = load.top_k, .groups = groups, .topology = topology});
  return both;
}

class ExpectedDispatchTest : public testing::TestWithParam<Shape> {};

TEST_P(ExpectedDispatchTest, MatchesCountsOfTokensFromOneDistribution) {
  const Shape& shape = GetParam();
  Random random(3);
  for (int trial = 0; trial < 3; ++trial) {
    const test::CountedTrace drawn = draw(shape, random);
    for (const bool splits : {false, true}) {
      const Slots slots = splits ? split(drawn.load, random) : at_home(drawn.load);
      const Both both = dispatch_both(drawn, slots, shape.groups);
      const auto ranks = static_cast<double>(sum(both.counted.to_rank));
      const auto nodes = static_cast<double>(sum(both.counted.to_node));
      EXPECT_NEAR(static_cast<double>(sum(both.expected.to_rank)) / ranks, 1, 0.02) << splits << trial;
      EXPECT_NEAR(static_cast<double>(sum(both.expected.to_node)) / nodes, 1, 0.02) << splits << trial;
    }
  }
}

TEST_P(ExpectedDispatchTest, SendsAPlaceBetweenItsBusiestExpertsRowsAndAllItsRows) {
  const Shape& shape = GetParam();
  Random random(5);
  const test::CountedTrace drawn = draw(shape, random);
  const Both both = dispatch_both(drawn, split(drawn.load, random), shape.groups);
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

TEST(ExpectedDispatch, EqualsTheDispatchTableForOneExpertPerToken) {
  Random random(9);
  const test::CountedTrace drawn =
      draw({.tokens = 300, .ranks = 4, .ranks_per_node = 2, .experts = 16, .top_k = 1, .spread = 1}, random);
  const Both both = dispatch_both(drawn, split(drawn.load, random), {});
  EXPECT_EQ(both.expected.to_rank, dispatch_table(both.routed));
  EXPECT_EQ(both.expected.to_rank, both.counted.to_rank);
  EXPECT_EQ(both.expected.to_node, both.counted.to_node);
}

// Only rank 0 has tokens. They choose two of eight experts. Four ranks are on two nodes.
LoadTable load_of_one_source(const std::vector<std::int64_t>& counts) {
  LoadTable load{.load = Array<Tokens, 4>({1, 1, 4, 8}), .top_k = 2, .ranks_per_node = 2};
  for (std::size_t e = 0; e < counts.size(); ++e) load.load(0, 0, 0, e) = Tokens{counts[e]};
  return load;
}

TokenDispatch of_one_source(const Slots& slots, const LoadTable& load) {
  const Topology topology{.num_ranks = 4, .ranks_per_node = 2};
  const RoutingProblem problem{.load = load.load[0][0], .quotas = slots.quotas(), .topology = topology};
  return expected_token_dispatch(route_tokens(problem),
                                 {.load = problem.load, .top_k = load.top_k, .groups = {}, .topology = topology});
}

TEST(ExpectedDispatch, RespectsItsBoundsIfCountsMatchNoDistinctExperts) {
  const std::vector<std::int64_t> counts{0, 0, 1000, 0, 1, 0, 0, 3};  // experts 2 and 3 are at home on rank 1
  const LoadTable load = load_of_one_source(counts);
  const TokenDispatch rows = of_one_source(at_home(load), load);
  EXPECT_EQ(rows.to_rank(0, 0), Tokens{0});
  EXPECT_EQ(rows.to_rank(0, 1), Tokens{1000});
  EXPECT_EQ(rows.to_rank(0, 2), Tokens{1});  // ranks 2 and 3 serve one chosen expert each and receive all of its rows
  EXPECT_EQ(rows.to_rank(0, 3), Tokens{3});
  EXPECT_GE(rows.to_node(0, 1), Tokens{3});
  EXPECT_LE(rows.to_node(0, 1), Tokens{4});
}

TEST(ExpectedDispatch, CountsAllRowsOfAnExpertWithTwoReplicasOnANode) {
  const std::vector<std::int64_t> counts{0, 0, 0, 0, 600, 0, 0, 0};
  const LoadTable load = load_of_one_source(counts);
  Slots slots = at_home(load);  // expert 4 is at home on rank 2; half of its rows go to rank 3
  slots.tokens(2, 0) = Tokens{300};
  slots.expert(3, 2) = ExpertId{4};
  slots.tokens(3, 2) = Tokens{300};
  const TokenDispatch rows = of_one_source(slots, load);
  EXPECT_EQ(rows.to_rank(0, 2), Tokens{300});
  EXPECT_EQ(rows.to_rank(0, 3), Tokens{300});
  EXPECT_EQ(rows.to_node(0, 1), Tokens{600});
}

TEST(ExpectedDispatch, RoundingPreservesTheExpectedSumOverPlaces) {
  // Top-2 of eight equally frequent experts, two on each of four ranks: a token misses a rank with probability 15 / 28,
  // and both ranks of a node with 6 / 28.
  const std::vector<std::int64_t> counts(8, 5);
  const LoadTable load = load_of_one_source(counts);
  const TokenDispatch rows = of_one_source(at_home(load), load);
  std::int64_t to_ranks = 0;
  for (const Tokens n : rows.to_rank.row(0)) to_ranks += n.value;
  EXPECT_NEAR(static_cast<double>(to_ranks), 4 * 20 * 13.0 / 28, 0.5);  // 37.1; rounding each rank alone gives 36
  EXPECT_NEAR(static_cast<double>(rows.to_node(0, 0).value + rows.to_node(0, 1).value), 2 * 20 * 22.0 / 28, 0.5);
}

TEST(ExpectedDispatch, IsZeroForASourceWithoutTokens) {
  Random random(9);
  test::CountedTrace drawn =
      draw({.tokens = 50, .ranks = 4, .ranks_per_node = 2, .experts = 16, .top_k = 2, .spread = 1}, random);
  std::ranges::fill(drawn.load.load[0][0].row(1), Tokens{0});
  const Slots slots = at_home(drawn.load);
  const Topology topology{.num_ranks = 4, .ranks_per_node = 2};
  const RoutedLayer routed =
      route_tokens({.load = drawn.load.load[0][0], .quotas = slots.quotas(), .topology = topology});
  const TokenDispatch expected =
      expected_token_dispatch(routed, {.load = drawn.load.load[0][0], .top_k = 2, .groups = {}, .topology = topology});
  for (const Tokens n : expected.to_rank.row(1)) EXPECT_EQ(n, Tokens{0});
  for (const Tokens n : expected.to_node.row(1)) EXPECT_EQ(n, Tokens{0});
  EXPECT_GT(expected.to_node(0, 1), Tokens{0});
}

}  // namespace
}  // namespace foremoe
