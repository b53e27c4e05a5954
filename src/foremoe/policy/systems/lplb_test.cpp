// Tests LPLB's topologies, examples worked by hand, and the balance that its own tests require. clp/lplb_lp_test.cpp
// compares its token split with CLP.

#include "foremoe/policy/systems/lplb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "foremoe/core/error.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/testing/finemoe_instances.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using lplb::Edges;
using test::result_of;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int> sources(Edges edges, const Topology& topology, int rank) {
  const Array<RankId, 2> all = lplb::edge_sources(edges, topology);
  std::vector<int> of_rank;
  for (const RankId r : all.row(rank)) of_rank.push_back(r.value);
  return of_rank;
}

TEST(LplbEdges, MatchTheRepository) {
  const Topology two_cubes{.num_ranks = 16, .ranks_per_node = 8};
  EXPECT_THAT(sources(Edges::kCube, two_cubes, 0), ElementsAre(3, 6));
  EXPECT_THAT(sources(Edges::kCube, two_cubes, 13), ElementsAre(12, 9));  // 5: 4, 1
  EXPECT_THAT(sources(Edges::kHypercube, two_cubes, 0), ElementsAre(3, 12));
  EXPECT_THAT(sources(Edges::kHypercube, two_cubes, 13), ElementsAre(12, 9));
  EXPECT_THAT(sources(Edges::kRing, two_cubes, 7), ElementsAre(0));
  EXPECT_THAT(sources(Edges::kRing, two_cubes, 8), ElementsAre(9));
  // torus_2d(8, 4): rank (i, j) copies from ((i + 1) mod 8, j) and (i, (j + 1) mod 4).
  const Topology torus{.num_ranks = 32, .ranks_per_node = 4};
  EXPECT_THAT(sources(Edges::kTorus, torus, 30), ElementsAre(2, 31));
  EXPECT_THAT(sources(Edges::kTorus, torus, 7), ElementsAre(11, 4));
}

TEST(LplbEdges, LetEveryRankSendAndReceiveOncePerColumn) {
  for (const auto& [edges, num_ranks, per_node] : {std::tuple{Edges::kRing, 6, 6},
                                                   {Edges::kRing, 24, 8},
                                                   {Edges::kCube, 24, 8},
                                                   {Edges::kHypercube, 32, 8},
                                                   {Edges::kTorus, 12, 4},
                                                   {Edges::kTorus, 4, 2}}) {
    const Array<RankId, 2> all = lplb::edge_sources(edges, {.num_ranks = num_ranks, .ranks_per_node = per_node});
    for (std::size_t c = 0; c < all.extent(1); ++c) {
      std::vector<int> given(num_ranks);
      for (int r = 0; r < num_ranks; ++r) {
        EXPECT_NE(all(r, c), RankId{r});
        ++given[all(r, c).index()];
      }
      EXPECT_THAT(given, testing::Each(1));
    }
  }
}

TEST(LplbEdges, AreChosenByRanksNodesAndSlots) {
  EXPECT_EQ(lplb::choose_edges({.num_ranks = 8, .ranks_per_node = 8}, 1), Edges::kRing);
  EXPECT_EQ(lplb::choose_edges({.num_ranks = 8, .ranks_per_node = 4}, 2), Edges::kCube);
  EXPECT_EQ(lplb::choose_edges({.num_ranks = 16, .ranks_per_node = 8}, 3), Edges::kHypercube);
  EXPECT_EQ(lplb::choose_edges({.num_ranks = 64, .ranks_per_node = 8}, 2), Edges::kTorus);
  EXPECT_EQ(lplb::choose_edges({.num_ranks = 64, .ranks_per_node = 64}, 2), Edges::kCube);
  EXPECT_EQ(lplb::choose_edges({.num_ranks = 6, .ranks_per_node = 6}, 2), Edges::kRing);
  EXPECT_EQ(lplb::choose_edges({.num_ranks = 6, .ranks_per_node = 4}, 2), Edges::kRing);  // nodes differ in size
}

StepPlan planned(const test::PolicyRun& run, Edges edges = Edges::kAutomatic) {
  return test::plan_of(*make_lplb({.edges = edges}), run);
}

// One micro-step, one layer. Each rank is the source of its own experts' tokens.
LoadTable load_of(const std::vector<std::int64_t>& of_expert, int num_ranks) {
  LoadTable load;
  load.ranks_per_node = num_ranks;
  load.load = Array<Tokens, 4>({1, 1, static_cast<std::size_t>(num_ranks), of_expert.size()});
  const std::size_t num_homes = of_expert.size() / static_cast<std::size_t>(num_ranks);
  for (std::size_t e = 0; e < of_expert.size(); ++e) load.load(0, 0, e / num_homes, e) = Tokens{of_expert[e]};
  return load;
}

std::vector<std::int64_t> rank_loads(const StepPlan& plan) {
  std::vector<std::int64_t> loads;
  for (int r = 0; r < plan.num_ranks(); ++r) {
    loads.push_back(0);
    for (const Tokens tokens : plan.slot_tokens.row(0, 0, r)) loads.back() += tokens.value;
  }
  return loads;
}

// Ring of two. Rank 0 has 60 + 10; its larger expert 0 is copied to rank 1. Rank 1 has 20 + 30; expert 3 is copied to
// rank 0. A flow of 10 along expert 0's edge gives both 60.
TEST(Lplb, CopiesTheLargestExpertAlongTheEdgeAndSplitsIt) {
  const LoadTable load = load_of({60, 10, 20, 30}, 2);
  const StepPlan plan = planned({.load = load});
  EXPECT_EQ(plan.residency, Residency::kResident);
  EXPECT_EQ(plan.slot_expert(0, 0, 0, 2), ExpertId{3});
  EXPECT_EQ(plan.slot_expert(0, 0, 1, 2), ExpertId{0});
  EXPECT_THAT(rank_loads(plan), ElementsAre(60, 60));
}

// Ring of four: rank r copies the expert of rank r + 1. Only ranks 0 and 3 hold expert 0 with its 100 tokens, so the
// optimum is 50, twice the mean. LPLB's documentation mentions this limit of two replicas.
TEST(Lplb, IsLimitedByTwoReplicasPerExpert) {
  const StepPlan plan = planned({.load = load_of({100, 0, 0, 0}, 4)});
  EXPECT_THAT(rank_loads(plan), ElementsAre(50, 0, 0, 50));
  // Ranks 0 and 3 serve expert 0's 100 tokens. Ranks 1 and 2 have room for all of the other 40 and 20.
  EXPECT_THAT(planned({.load = load_of({100, 40, 0, 20}, 4)}).max_load(0, 0), Tokens{50});
}

TEST(Lplb, UsesAMultipleOfTheColumns) {
  const LoadTable load = test::random_load({.ranks = 8, .experts = 64, .ranks_per_node = 8}, 1);
  for (const auto& [guest_slots, used] : {std::pair{0, 0}, {1, 1}, {2, 2}, {3, 2}, {5, 4}, {8, 8}, {9, 8}}) {
    const StepPlan plan = planned({.load = load, .guest_slots = guest_slots});
    for (int r = 0; r < 8; ++r) {
      const auto row = plan.slot_expert.row(0, 1, r);
      EXPECT_EQ(std::ranges::count(row, kNoExpert), guest_slots - used);
    }
    for (int e = 0; e < 64; ++e) {
      EXPECT_LE(std::ranges::count(plan.slot_expert.view()[0][1].flat(), ExpertId{e}), 2);
    }
  }
}

TEST(Lplb, KeepsItsGuestsForTheWholeStep) {
  const LoadTable load = test::random_load({.micro_steps = 5, .ranks = 8, .experts = 32}, 2);
  for (const int in_flight : {1, 3}) {
    const StepPlan plan = planned({.load = load, .guest_slots = 2, .in_flight = in_flight});
    for (int t = 1; t < plan.num_events(); ++t) {
      EXPECT_TRUE(std::ranges::equal(plan.slot_expert.view()[t].flat(), plan.slot_expert.view()[0].flat()));
    }
  }
}

TEST(Lplb, CopiesByThePreviousLoadIfGiven) {
  const LoadTable load = test::random_load({.ranks = 8, .experts = 32}, 1);
  const LoadTable former = test::random_load({.ranks = 8, .experts = 32}, 2);
  const auto slots = [](const StepPlan& plan) {
    const auto of_event = plan.slot_expert.view()[0].flat();
    return std::vector(of_event.begin(), of_event.end());
  };
  EXPECT_EQ(slots(planned({.load = load, .guest_slots = 2, .previous_load = &former})),
            slots(planned({.load = former, .guest_slots = 2})));
  const LoadTable other = test::random_load({.layers = 1}, 1);
  EXPECT_THROW(result_of(*make_lplb(), {.load = load, .previous_load = &other}), InputError);
}

TEST(Lplb, ReportsTheRequirementsOfATopology) {
  const LoadTable six = test::random_load({.ranks = 6, .experts = 12, .ranks_per_node = 6}, 1);
  const LoadTable sixteen = test::random_load({.ranks = 16, .experts = 32, .ranks_per_node = 16}, 1);
  const auto reason = [](const test::PolicyRun& run, Edges edges) {
    return std::get<Skipped>(result_of(*make_lplb({.edges = edges}), run)).reason;
  };
  EXPECT_EQ(reason({.load = six, .guest_slots = 2}, Edges::kCube),
            "the cube asks for a multiple of 8 ranks, not 6 ranks");
  EXPECT_EQ(reason({.load = sixteen, .guest_slots = 1}, Edges::kHypercube),
            "the hypercube asks for 2 guest slots and 2 experts per rank at least");
  EXPECT_THAT(reason({.load = sixteen, .guest_slots = 2}, Edges::kTorus), HasSubstr("the torus asks for"));
  EXPECT_THAT(reason({.load = sixteen, .guest_slots = 0}, Edges::kRing), HasSubstr("1 guest slots"));
  const LoadTable uneven = test::random_load({.ranks = 3, .experts = 8}, 1);
  ThreadPool pool(1);
  const Array<RankId, 2> home({2, 8});
  EXPECT_TRUE(std::holds_alternative<Skipped>(make_lplb()->plan({.load = uneven, .home = home, .options = {}}, pool)));
}

// LPLB's tests/test_solve.py draws once for each topology: 256 experts with load N(1, 0.3) and expected load N(1,
// 0.15). It requires ρ below 1.03 on 16 ranks with the hypercube, and below 1.07 on 32 with the cube. This test
// requires the mean of ten draws. LPLB's test first reorders experts by a history that is independent of the load.
TEST(Lplb, MeetsTheBoundsOfItsOwnTests) {
  Random random(42);
  const auto drawn = [&](int ranks, double deviation) {
    std::vector<std::int64_t> of_expert(256);
    for (std::int64_t& n : of_expert) n = std::llround(std::max(0.0, 1 + deviation * random.normal()) * 4096);
    return load_of(of_expert, ranks);
  };
  for (const auto& [edges, ranks, bound] : {std::tuple{Edges::kHypercube, 16, 1.03}, {Edges::kCube, 32, 1.07}}) {
    double mean = 0;
    for (int i = 0; i < 10; ++i) {
      const LoadTable history = drawn(ranks, 0.15);
      const LoadTable load = drawn(ranks, 0.3);
      const StepPlan plan = planned({.load = load, .guest_slots = 2, .previous_load = &history}, edges);
      mean += plan_figures(plan, load).rho.mean / 10;
    }
    EXPECT_LT(mean, bound);
  }
}

}  // namespace
}  // namespace foremoe
