#include "foremoe/policy/systems/llep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/plan/check_plan.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::experts;
using test::load_of;
using test::plan_of;
using test::tokens;
using testing::ElementsAre;

// Homes {0, 1} and {2, 3} have 120 and 40 tokens; the capacity is 80. e0 (100) is first. Reserving 20 for e1, the home
// serves 60. Rank 1 reserves 40 for its own and serves the other 40. Then e2, e1 and e3 fit at home.
TEST(Llep, FillsTheHomeAndSpillsToTheLeastLoadedRank) {
  const LoadTable load = load_of(2, {{100, 20, 30, 10}});
  const StepPlan plan = plan_of(*make_llep(), {.load = load});
  EXPECT_EQ(plan.residency, Residency::kShared);
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(0, 1, -1));
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(60, 20, 0));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(2, 3, 0));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(30, 10, 40));
}

// The capacity is 1200, so e0 spills 1800. Rank 2 has room for 1100, which is above the minimum chunk. The remaining
// 700 are below the minimum, but allowed as the whole rest.
TEST(Llep, SpillsASmallChunkOnlyIfItIsTheWholeRest) {
  const LoadTable load = load_of(3, {{3000, 500, 100}});
  const StepPlan plan = plan_of(*make_llep(), {.load = load});
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(1200, 0));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(500, 700));
  EXPECT_THAT(tokens(plan, 0, 2), ElementsAre(100, 1100));
}

// Both ranks have room for 900 of 1800 tokens, below the minimum chunk. The least loaded receives all 1800 and has no
// capacity for its own 300.
TEST(Llep, SpillsTheRestToTheLeastLoadedRankIfNoneHasRoomForAChunk) {
  const LoadTable load = load_of(3, {{3000, 300, 300}});
  const StepPlan plan = plan_of(*make_llep(), {.load = load});
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(0, 1800));
  EXPECT_THAT(tokens(plan, 0, 2), ElementsAre(300, 300));
  const StepPlan balanced = plan_of(*make_llep({.min_chunk = 1}), {.load = load});
  for (int r = 1; r < 3; ++r) EXPECT_THAT(tokens(balanced, 0, r), ElementsAre(300, 900));
}

TEST(Llep, SpillsNothingUpToTheThreshold) {
  const LoadTable load = load_of(2, {{130, 70}, {131, 69}});  // ρ 1.3 and 1.31
  const StepPlan plan = plan_of(*make_llep({.min_chunk = 1}), {.load = load});
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(130, 0));
  EXPECT_THAT(tokens(plan, 1, 0), ElementsAre(100, 0));
}

TEST(Llep, SkipsRanksWithoutAFreeSlot) {
  // The capacity is ⌊130 / 3⌋ = 43: e0 spills 27, e1 spills 17, and rank 2 is the least loaded for both. If its slot is
  // taken, no rank with a slot has room, and rank 0 has as much as rank 1.
  const LoadTable load = load_of(3, {{70, 60, 0}});
  const StepPlan plan = plan_of(*make_llep({.min_chunk = 1}), {.load = load});
  EXPECT_THAT(tokens(plan, 0, 2), ElementsAre(0, 27));
  EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(43, 17));
  EXPECT_THAT(tokens(plan, 0, 1), ElementsAre(43, 0));
  const StepPlan more = plan_of(*make_llep({.min_chunk = 1}), {.load = load, .guest_slots = 2});
  EXPECT_THAT(tokens(more, 0, 2), ElementsAre(0, 27, 16));
}

// At most ranks − 1 tokens are above the capacity of all eight ranks.
TEST(Llep, StaysWithinItsCapacityIfSlotsAndChunksPermit) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const LoadTable load = test::random_load({.ranks = 8, .experts = 24}, seed, 400);
    for (const double factor : {1.0, 1.2}) {
      const auto policy = make_llep({.capacity_factor = factor, .min_chunk = 1, .imbalance_threshold = 0});
      const StepPlan plan = plan_of(*policy, {.load = load, .guest_slots = 21});
      for (std::size_t i = 0; i < plan.max_load.size(); ++i) {
        EXPECT_LE(static_cast<double>(plan.max_load.flat()[i].value),
                  factor * static_cast<double>(plan.lower_bound.flat()[i].value) + 7);
      }
    }
  }
}

// The capacity is 43, as above. Rank 2 serves 27 of e0 and 16 of e1, as two guests. The last token of e1 is above the
// capacity of all ranks. Its home is excluded, so it goes to the least loaded other rank, the lower of two: rank 0.
TEST(Llep, UsesAsManySlotsAsNeededWithoutALimit) {
  const LoadTable load = load_of(3, {{70, 60, 0}, {130, 0, 0}});
  const auto policy = make_llep({.min_chunk = 1, .slot_limit = false});
  for (const int guest_slots : {0, 1, 5}) {
    const StepPlan plan = plan_of(*policy, {.load = load, .guest_slots = guest_slots});
    EXPECT_EQ(plan.guest_slots, 2);
    EXPECT_THAT(tokens(plan, 0, 2), ElementsAre(0, 27, 16));
    EXPECT_THAT(tokens(plan, 0, 0), ElementsAre(43, 1, 0));
  }
}

TEST(Llep, WithoutALimitPlansAsWithSlotsForEveryExpert) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const LoadTable load = test::random_load({.micro_steps = 3, .layers = 2, .ranks = 8, .experts = 24}, seed, 400);
    const LlepOptions options{.min_chunk = 30, .imbalance_threshold = 0};
    LlepOptions without = options;
    without.slot_limit = false;
    const StepPlan enough = plan_of(*make_llep(options), {.load = load, .guest_slots = 21});
    const StepPlan plan = plan_of(*make_llep(without), {.load = load});
    EXPECT_EQ(plan.max_load, enough.max_load);
    ASSERT_GT(plan.guest_slots, 1);
    const StepPlan fewer = plan_of(*make_llep(options), {.load = load, .guest_slots = plan.guest_slots - 1});
    EXPECT_NE(fewer.slot_tokens, plan.slot_tokens);
  }
}

TEST(Llep, CopiesAfterTheRouter) { EXPECT_TRUE(make_llep()->online().copies_after_router); }

// Mean ρ and copies per layer and micro-step, from the public compute_llep_lpt_plan run on these tables.
TEST(Llep, HasTheCopiesOfThePublicCodeWithoutALimit) {
  struct Row {
    const char* table;
    double rho;
    double copies;
  };
  for (const Row row : {Row{"q30-ep8", 1.0662, 6.33}, Row{"q30-ep8-bursty", 1.0141, 12.66},
                        Row{"q30-ep16-bursty", 1.0001, 19.12}, Row{"q30-ep64-bursty", 1.0436, 60.33}}) {
    const LoadTable load = read_load(std::string("data/load-") + row.table + ".safetensors");
    const PlanFigures figures = plan_figures(plan_of(*make_llep({.slot_limit = false}), {.load = load}), load);
    EXPECT_NEAR(figures.rho.mean, row.rho, 0.00011) << row.table;
    EXPECT_NEAR(figures.copies_per_layer_event, row.copies, 0.011) << row.table;
  }
}

}  // namespace
}  // namespace foremoe
