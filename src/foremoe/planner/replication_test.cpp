// Tests that stage P reaches the target of one micro-step with the fewest guests.

#include "foremoe/planner/replication.h"

#include <gtest/gtest.h>

#include "foremoe/core/random.h"
#include "foremoe/testing/complete_assignment.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe::planner {
namespace {

struct Balanced {
  ReplicaGraph graph;
  Assignment assignment;
  int copies = 0;
  std::int64_t level() const { return *std::ranges::max_element(assignment.rank_load); }
};

// Plans micro-step m from the guests in `found`. Checks that all tokens are served and that homes do not change.
Balanced balance(const LayerProblem& p, const PlannerOptions& options, int m, const ReplicaGraph& found) {
  Balanced b{.graph = found};
  Replication(p, options).balance(m, b.graph, b.assignment);
  test::expect_complete(b.graph, p.load(m), b.assignment);
  for (int s = 0; s < found.num_slots(); ++s) {
    const int e = b.graph.expert_in(s);
    if (e >= 0) {
      EXPECT_EQ(b.graph.find(e, b.graph.rank_of(s)), s) << "twice on a rank";
    }
    b.copies += e >= 0 && found.find(e, b.graph.rank_of(s)) < 0 ? 1 : 0;
  }
  for (int e = 0; e < p.num_experts; ++e) EXPECT_EQ(b.graph.expert_in(p.home_slot[e]), e);
  return b;
}

Balanced balance(const LoadTable& load, const PlannerOptions& options) {
  const LayerProblem p = test::problem_of(load, options);
  return balance(p, options, 0, homes_only(p));
}

TEST(Replication, CopiesNothingWhenTheGuestsFoundSuffice) {
  const PlannerOptions options{.guest_slots = 1};
  const LayerProblem p = test::problem_of(test::load_of(2, {{100, 50, 10, 40}}), options);
  ReplicaGraph graph = homes_only(p);
  graph.put(graph.first_slot(1) + 2, 0);
  const Balanced b = balance(p, options, 0, graph);
  EXPECT_EQ(b.copies, 0);
  EXPECT_EQ(b.level(), 100);
}

TEST(Replication, CopiesNothingWithoutLoadWithoutSlotsOrWithOneRank) {
  EXPECT_EQ(balance(test::load_of(2, {{0, 0}}), {.guest_slots = 1}).copies, 0);
  EXPECT_EQ(balance(test::load_of(2, {{9, 0}}), {.guest_slots = 0}).copies, 0);
  EXPECT_EQ(balance(test::load_of(1, {{9, 0}}), {.guest_slots = 2}).copies, 0);
}

// One expert has all tokens: every other rank needs exactly one copy of it.
TEST(Replication, SpreadsACollapsedRouterOverAllRanks) {
  for (const int ranks : {2, 3, 8, 16}) {
    std::vector<std::int64_t> load(2 * ranks, 0);
    load[1] = 1000 * ranks;
    const Balanced b = balance(test::load_of(ranks, {load}), {.guest_slots = 1, .tolerance = 0.0});
    EXPECT_EQ(b.level(), 1000);
    EXPECT_EQ(b.copies, ranks - 1);
  }
}

// One rank's load is 60 above the mean and another's is 60 below, so one copy suffices.
TEST(Replication, RemovesOneBottleneckWithOneCopy) {
  const Balanced b = balance(test::load_of(4, {{100, 60, 50, 50, 50, 50, 20, 20}}), {.guest_slots = 2});
  EXPECT_EQ(b.level(), 100);
  EXPECT_EQ(b.copies, 1);
}

// Rank 0 can move tokens to rank 1 through the existing guest; rank 1 moves its own to rank 2 through a new guest.
TEST(Replication, FindsRoomThroughOtherRanks) {
  const PlannerOptions options{.guest_slots = 1, .max_copies_per_source = 1};
  const LayerProblem p = test::problem_of(test::load_of(3, {{200, 100, 0}}), options);
  ReplicaGraph graph = homes_only(p);
  graph.put(graph.first_slot(1) + 1, 0);
  const Balanced b = balance(p, options, 0, graph);
  EXPECT_EQ(b.level(), 100);
  EXPECT_EQ(b.copies, 1);
}

TEST(Replication, ReachesTheOptimumOfItsPlacement) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const LoadTable load = test::bursty_load({.micro_steps = 2, .ranks = 8, .experts = 16}, seed);
    const PlannerOptions options{.guest_slots = static_cast<int>(1 + seed % 2)};
    const LayerProblem p = test::problem_of(load, options);
    ReplicaGraph graph = homes_only(p);
    for (int m = 0; m < p.num_micro_steps; ++m) {
      const Balanced b = balance(p, options, m, graph);
      EXPECT_LE(b.level(), std::max(p.target[m], test::optimum_on(b.graph, p.load(m)))) << "seed " << seed;
      graph = b.graph;
    }
  }
}

TEST(Replication, RespectsAndUsesItsBudgets) {
  double vanilla = 0;
  double budgeted = 0;
  double unlimited = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const LoadTable load = test::bursty_load({.micro_steps = 1, .ranks = 8, .experts = 32}, seed);
    PlannerOptions options{.guest_slots = 2};
    const Balanced free = balance(load, options);
    (seed % 2 == 0 ? options.max_copies_per_rank.emplace() : options.max_copies_per_source) = 1;
    const Balanced b = balance(load, options);
    const LayerProblem p = test::problem_of(load, options);
    std::vector<int> to(8);
    std::vector<int> from(8);
    for (int s = 0; s < b.graph.num_slots(); ++s) {
      const int e = b.graph.expert_in(s);
      if (e < 0 || s == p.home_slot[e]) continue;
      ++to[b.graph.rank_of(s)];
      ++from[p.home[e]];
    }
    if (options.max_copies_per_rank) {
      EXPECT_LE(*std::ranges::max_element(to), 1);
    }
    if (options.max_copies_per_source != kNoLimit) {
      EXPECT_LE(*std::ranges::max_element(from), 1);
    }
    Assignment at_homes;
    serve_at_homes(p, 0, at_homes);
    vanilla += static_cast<double>(*std::ranges::max_element(at_homes.rank_load)) * p.per_mean[0];
    budgeted += static_cast<double>(b.level()) * p.per_mean[0];
    unlimited += static_cast<double>(free.level()) * p.per_mean[0];
  }
  EXPECT_LE(unlimited, budgeted + 1e-6);
  EXPECT_LT(budgeted - 40, 0.6 * (vanilla - 40)) << "of the imbalance at homes, one copy per rank or source mends much";
}

// If the load repeats, the guests copied the first time suffice.
TEST(Replication, CopiesNothingWhenTheLoadRepeats) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const LoadTable load = test::bursty_load({.micro_steps = 1, .ranks = 8, .experts = 32}, seed);
    const PlannerOptions options{.guest_slots = 2};
    const LayerProblem p = test::problem_of(load, options);
    const Balanced first = balance(p, options, 0, homes_only(p));
    if (first.level() > p.target[0]) continue;
    EXPECT_EQ(balance(p, options, 0, first.graph).copies, 0) << "seed " << seed;
  }
}

}  // namespace
}  // namespace foremoe::planner
