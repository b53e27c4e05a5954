// Tests stage B, guests: one set of guests for all micro-steps of a step.

#include "foremoe/planner/base_guests.h"

#include <gtest/gtest.h>

#include <array>

#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"

namespace foremoe::planner {
namespace {

// Mean over micro-steps of the lowest imbalance ratio possible with these guests.
double rho_on(const LayerProblem& p, const ReplicaGraph& graph) {
  double sum = 0;
  for (int m = 0; m < p.num_micro_steps; ++m) {
    sum += static_cast<double>(test::optimum_on(graph, p.load(m))) * p.per_mean[m];
  }
  return sum / p.num_micro_steps;
}

int num_guests(const LayerProblem& p, const ReplicaGraph& graph) {
  int guests = 0;
  for (int s = 0; s < graph.num_slots(); ++s) {
    guests += graph.expert_in(s) >= 0 && s != p.home_slot[graph.expert_in(s)] ? 1 : 0;
  }
  return guests;
}

void expect_homes_in_place(const LayerProblem& p, const ReplicaGraph& graph) {
  for (int e = 0; e < p.num_experts; ++e) ASSERT_EQ(graph.expert_in(p.home_slot[e]), e);
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) >= 0) {
      ASSERT_EQ(graph.find(graph.expert_in(s), graph.rank_of(s)), s) << "twice on a rank";
    }
  }
}

ReplicaGraph chosen(const LayerProblem& p, BaseGoal goal) {
  ReplicaGraph graph = homes_only(p);
  BaseGuests(p, goal).choose(graph);
  expect_homes_in_place(p, graph);
  return graph;
}

void put_random_guests(const LayerProblem& p, Random& random, ReplicaGraph& graph) {
  for (int r = 0; r < p.num_ranks(); ++r) {
    for (int g = 0; g < p.guest_slots; ++g) {
      const int e = static_cast<int>(random.below(p.num_experts));
      if (graph.find(e, r) < 0) graph.put(graph.first_slot(r) + p.homes_per_rank() + g, e);
    }
  }
}

constexpr BaseGoal kGoals[] = {BaseGoal::kFinal, BaseGoal::kReplaceable};

// A load with a mean of `rows` rows per rank: 2·`rows` in the first micro-step, `rows` in the second, and none in the
// third.
LayerProblem problem_with(int ranks, std::int64_t rows, int guest_slots) {
  std::vector<std::vector<std::int64_t>> of_experts(3, std::vector<std::int64_t>(ranks, 0));
  std::ranges::fill(of_experts[0], 2 * rows);
  std::ranges::fill(of_experts[1], rows);
  return test::problem_of(test::load_of(ranks, of_experts), {.guest_slots = guest_slots});
}

TEST(BaseGuests, CopiesHideWithTwoSlotsManyRanksAndManyRows) {
  EXPECT_TRUE(copies_hide(problem_with(17, 8192, 2)));
  EXPECT_TRUE(copies_hide(problem_with(64, 10000, 3)));
  EXPECT_FALSE(copies_hide(problem_with(17, 8192, 1)));
  EXPECT_FALSE(copies_hide(problem_with(16, 8192, 2)));
  EXPECT_FALSE(copies_hide(problem_with(17, 8191, 2)));
}

TEST(BaseGuests, WithoutSweepsEqualTheGrownGuests) {
  Random random(11);
  std::vector<std::vector<std::int64_t>> of_experts(4, std::vector<std::int64_t>(32));
  for (auto& of_micro_step : of_experts) {
    for (std::int64_t& rows : of_micro_step) rows = static_cast<std::int64_t>(random.below(90));
  }
  const LayerProblem p = test::problem_of(test::load_of(8, of_experts), {.guest_slots = 2});
  ReplicaGraph grown = homes_only(p);
  BaseGuests(p, BaseGoal::kReplaceable).choose(grown, false);
  expect_homes_in_place(p, grown);
  BaseGuests in_parts(p, BaseGoal::kReplaceable);
  ReplicaGraph swept = homes_only(p);
  in_parts.grow_all(swept);
  for (int s = 0; s < swept.num_slots(); ++s) EXPECT_EQ(grown.expert_in(s), swept.expert_in(s));
  EXPECT_GT(num_guests(p, grown), 0);
}

TEST(BaseGuests, AreEmptyIfHomesAreBalanced) {
  for (const BaseGoal goal : kGoals) {
    const LayerProblem p =
        test::problem_of(test::load_of(4, {{5, 5, 5, 5, 5, 5, 5, 5}, {9, 0, 3, 6, 4, 5, 8, 1}}), {.guest_slots = 2});
    EXPECT_EQ(num_guests(p, chosen(p, goal)), 0);
  }
}

TEST(BaseGuests, AreEmptyWithoutLoadOrSlots) {
  for (const BaseGoal goal : kGoals) {
    const LayerProblem no_load = test::problem_of(test::load_of(2, {{0, 0, 0, 0}}), {.guest_slots = 1});
    EXPECT_EQ(num_guests(no_load, chosen(no_load, goal)), 0);
    const LayerProblem no_slots = test::problem_of(test::load_of(2, {{9, 9, 0, 0}}), {.guest_slots = 0});
    EXPECT_EQ(num_guests(no_slots, chosen(no_slots, goal)), 0);
  }
}

// Expert 0 is hot in all micro-steps but one, expert 2 in that one. Rank 1 has one slot, so it must copy expert 0.
// Ranks are nodes. All ranks have equal loads. Rank 0 sends most tokens to expert 3, rank 1 to expert 0.
TEST(BaseGuests, KeepTheMostTokensOnTheirNodeIfLinksArePreferred) {
  LoadTable table = test::load_of(2, {{100, 100, 100, 100}}, 1);
  const std::array<std::array<int, 4>, 2> sent{{{5, 50, 60, 85}, {95, 50, 40, 15}}};
  for (std::size_t r = 0; r < 2; ++r) {
    for (std::size_t e = 0; e < 4; ++e) table.load(0, 0, r, e) = Tokens{sent[r][e]};
  }
  const LayerProblem p = test::problem_of(table, {.guest_slots = 1});
  for (const BaseGoal goal : kGoals) {
    ReplicaGraph graph = homes_only(p);
    BaseGuests(p, goal, LocalGuests(p, {.prefer = Prefer::kLinks})).choose(graph);
    EXPECT_EQ(num_guests(p, graph), 2);
    EXPECT_GE(graph.find(3, 0), 0);
    EXPECT_GE(graph.find(0, 1), 0);
    EXPECT_EQ(num_guests(p, chosen(p, goal)), 0);
  }
}

// Tokens of pairs of an expert and a node that holds it, in mean rank loads.
double local_tokens(const LayerProblem& p, const ReplicaGraph& graph) {
  double local = 0;
  for (int m = 0; m < p.num_micro_steps; ++m) {
    for (int e = 0; e < p.num_experts; ++e) {
      for (int n = 0; n < p.topology.num_nodes(); ++n) {
        const RankRange ranks = p.topology.ranks_of(NodeId{n});
        bool held = false;
        for (int r = ranks.first; r < ranks.last; ++r) held = held || graph.find(e, r) >= 0;
        if (held) local += static_cast<double>(p.node_load(m, e, n)) * p.per_mean[m];
      }
    }
  }
  return local;
}

TEST(BaseGuests, AreMoreLocalAndNoLessBalancedThanLocalGuestsAloneIfLinksArePreferred) {
  double balanced = 0;
  double linked = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const LayerProblem p = test::problem_of(test::bursty_load({.ranks = 8, .experts = 32}, seed), {.guest_slots = 2});
    ReplicaGraph graph = homes_only(p);
    BaseGuests guests(p, BaseGoal::kReplaceable, LocalGuests(p, {.prefer = Prefer::kLinks}));
    guests.grow_all(graph);
    const double alone = rho_on(p, graph);
    guests.sweep(graph);
    expect_homes_in_place(p, graph);
    EXPECT_LE(rho_on(p, graph), alone) << "seed " << seed;
    linked += local_tokens(p, graph);
    balanced += local_tokens(p, chosen(p, BaseGoal::kReplaceable));
  }
  EXPECT_GT(linked, balanced);
}

TEST(BaseGuests, AreAsBalancedWithLinksAsWithoutIfFinal) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const LayerProblem p = test::problem_of(test::bursty_load({.ranks = 8, .experts = 32}, seed), {.guest_slots = 2});
    ReplicaGraph graph = homes_only(p);
    BaseGuests(p, BaseGoal::kFinal, LocalGuests(p, {.prefer = Prefer::kLinks})).choose(graph);
    expect_homes_in_place(p, graph);
    EXPECT_LE(rho_on(p, graph), rho_on(p, chosen(p, BaseGoal::kFinal))) << "seed " << seed;
  }
}

TEST(BaseGuests, ServeTheWholeStepRatherThanOneMicroStep) {
  test::ExpertLoads loads(8, {300, 0, 50, 50});
  loads[3] = {0, 0, 300, 100};
  const LayerProblem p = test::problem_of(test::load_of(2, loads), {.guest_slots = 1});
  const ReplicaGraph graph = chosen(p, BaseGoal::kFinal);
  EXPECT_GE(graph.find(0, 1), 0);
  EXPECT_GE(graph.find(2, 0), 0) << "the slot of rank 0 is free for what helps the other micro-step";
}

TEST(BaseGuests, ImproveBalanceWithEachAdditionalSlot) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const LoadTable load = test::bursty_load({.ranks = 8, .experts = 32}, seed);
    double before = 1e9;
    for (const int guest_slots : {0, 1, 2, 4}) {
      const LayerProblem p = test::problem_of(load, {.guest_slots = guest_slots});
      const double rho = rho_on(p, chosen(p, BaseGoal::kFinal));
      EXPECT_LE(rho, before) << "seed " << seed << ", G = " << guest_slots;
      before = rho;
    }
  }
}

TEST(BaseGuests, AreNoWorseThanTheirStart) {
  Random random(1);
  for (std::uint64_t seed = 1; seed <= 15; ++seed) {
    const LayerProblem p = test::problem_of(test::bursty_load({.ranks = 6, .experts = 24}, seed), {.guest_slots = 2});
    ReplicaGraph graph = homes_only(p);
    put_random_guests(p, random, graph);
    const double start = rho_on(p, graph);
    BaseGuests(p, BaseGoal::kFinal).choose(graph);
    expect_homes_in_place(p, graph);
    EXPECT_LE(rho_on(p, graph), start) << "seed " << seed;
  }
}

TEST(BaseGuests, KeepAnOptimalStart) {
  const LayerProblem p = test::problem_of(test::load_of(2, {{60, 20, 10, 10}, {70, 10, 10, 10}}), {.guest_slots = 1});
  ReplicaGraph graph = homes_only(p);
  graph.put(graph.first_slot(1) + 2, 0);
  BaseGuests(p, BaseGoal::kFinal).choose(graph);
  EXPECT_GE(graph.find(0, 1), 0);
  EXPECT_EQ(num_guests(p, graph), 1);
}

TEST(BaseGuests, AreFewerIfReplaceableThanIfFinal) {
  int beginning = 0;
  int final = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    const LayerProblem p = test::problem_of(test::bursty_load({.ranks = 8, .experts = 32}, seed), {.guest_slots = 2});
    beginning += num_guests(p, chosen(p, BaseGoal::kReplaceable));
    final += num_guests(p, chosen(p, BaseGoal::kFinal));
  }
  EXPECT_LT(beginning, final);
}

// Compares with all choices of one guest per rank, for two and three micro-steps.
TEST(BaseGuests, AreNearTheOptimumForTinySteps) {
  Random random(2);
  double found = 0;
  double best = 0;
  double worst = 1;
  constexpr int kInstances = 200;
  for (int n = 0; n < kInstances; ++n) {
    test::ExpertLoads loads(2 + random.below(2), std::vector<std::int64_t>(6));
    for (auto& of_experts : loads) {
      for (std::int64_t& load : of_experts)
        load = static_cast<std::int64_t>(random.below(random.below(3) ? 100 : 1000));
    }
    const LayerProblem p = test::problem_of(test::load_of(3, loads), {.guest_slots = 1});
    double least = 1e9;
    ReplicaGraph graph = homes_only(p);
    test::for_all_guests(p, graph, [&](const ReplicaGraph& placed) { least = std::min(least, rho_on(p, placed)); });
    const double rho = rho_on(p, chosen(p, BaseGoal::kFinal));
    ASSERT_GE(rho, least - 1e-6);
    found += rho;
    best += least;
    worst = std::max(worst, rho / least);
  }
  EXPECT_LE(found, 1.02 * best);
  EXPECT_LE(worst, 1.3);
}

}  // namespace
}  // namespace foremoe::planner
