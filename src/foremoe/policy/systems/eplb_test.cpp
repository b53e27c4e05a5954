#include "foremoe/policy/systems/eplb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "foremoe/core/error.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::experts;
using test::load_of;
using test::plan_of;
using test::result_of;
using testing::ElementsAre;
using testing::HasSubstr;

std::string reason_of(const Policy& policy, const test::PolicyRun& run) {
  const PolicyResult result = result_of(policy, run);
  return std::holds_alternative<Skipped>(result) ? std::get<Skipped>(result).reason : "";
}

// Compares each layer's experts, rank by rank, with the recorded cases of the reference.
TEST(EplbPolicies, MatchThePublicReferenceHierarchicallyAndGlobally) {
  std::ifstream file("data/eplb-golden.json");
  ASSERT_TRUE(file.is_open());
  const nlohmann::json recorded = nlohmann::json::parse(file);
  std::set<bool> hierarchical;
  for (const nlohmann::json& golden : recorded["cases"]) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const auto weight = golden["weight"].get<test::ExpertLoads>();
    const auto map = golden["physical_to_logical_map"].get<std::vector<std::vector<int>>>();
    const int num_ranks = golden["num_gpus"];
    const int num_nodes = golden["num_nodes"];
    const int num_groups = golden["num_groups"];
    const int num_experts = static_cast<int>(weight.front().size());
    const int slots_per_rank = golden["num_replicas"].get<int>() / num_ranks;
    const bool divides = num_groups % num_nodes == 0;
    hierarchical.insert(divides && num_nodes > 1);
    const EplbOptions published = {.num_groups = num_groups};
    const EplbOptions forced = {.mode = divides ? EplbMode::kHierarchical : EplbMode::kGlobal,
                                .num_groups = num_groups};
    for (std::size_t l = 0; l < weight.size(); ++l) {
      const LoadTable load = load_of(num_ranks, {weight[l]}, num_ranks / num_nodes);
      for (const EplbOptions& options : {published, forced}) {
        for (const auto& policy : {make_eplb(options), make_eplb_oracle(options)}) {
          const StepPlan plan =
              plan_of(*policy, {.load = load, .guest_slots = slots_per_rank - num_experts / num_ranks});
          for (int r = 0; r < num_ranks; ++r) {
            std::set<int> held;
            for (const int e : experts(plan, 0, r)) {
              if (e >= 0) held.insert(e);
            }
            const auto first = map[l].begin() + r * slots_per_rank;
            EXPECT_EQ(held, std::set<int>(first, first + slots_per_rank)) << "rank " << r;
          }
        }
      }
    }
  }
  EXPECT_THAT(hierarchical, ElementsAre(false, true));
}

// Two nodes of two ranks, two groups of four experts, no guest slots. Group loads are 12 + 1 + 1 + 1 and 3·4.
// Hierarchical: group 0, the heavier with 15, is packed into node 0, whose ranks get 12 + 1 and 1 + 1. Global: The
// expert with 12 shares its rank with one of load 1, and those with 3 go to the lightest ranks.
TEST(EplbPolicies, KeepGroupsOnNodesOnlyIfHierarchical) {
  const LoadTable load = load_of(4, {{12, 1, 1, 1, 3, 3, 3, 3}}, 2);
  const auto node_of_group_0 = [&](const EplbOptions& options) {
    const StepPlan plan = plan_of(*make_eplb(options), {.load = load, .guest_slots = 0});
    std::set<int> nodes;
    for (int r = 0; r < 4; ++r) {
      for (const int e : experts(plan, 0, r)) {
        if (e < 4) nodes.insert(r / 2);
      }
    }
    return nodes;
  };
  EXPECT_THAT(node_of_group_0({.num_groups = 2}), ElementsAre(0));
  EXPECT_THAT(node_of_group_0({.mode = EplbMode::kHierarchical, .num_groups = 2}), ElementsAre(0));
  EXPECT_THAT(node_of_group_0({.mode = EplbMode::kGlobal, .num_groups = 2}), ElementsAre(0, 1));
  EXPECT_THAT(node_of_group_0({}), ElementsAre(0, 1));  // one group by default
}

TEST(EplbPolicies, ReportWhyAHierarchicalPlacementIsImpossible) {
  const LoadTable load = test::random_load({.ranks = 4, .experts = 8, .ranks_per_node = 2}, 1);
  EXPECT_THAT(reason_of(*make_eplb({.mode = EplbMode::kHierarchical, .num_groups = 1}), {.load = load}),
              HasSubstr("1 expert groups cannot be divided among 2 nodes"));
  const LoadTable unequal = test::random_load({.ranks = 6, .experts = 12, .ranks_per_node = 4}, 1);
  EXPECT_THAT(reason_of(*make_eplb({.num_groups = 2}), {.load = unequal}), HasSubstr("6 ranks do not fill nodes of 4"));
  EXPECT_EQ(reason_of(*make_eplb({.num_groups = 3}), {.load = unequal}), "");  // global, as in the reference
}

// α = ½, period 2, two slots per rank.
//   m  load            average after       placement
//   0  8  6  1  1      8   6    1    1     homes: no load so far
//   1  8  6  1  1      8   6    1    1     homes
//   2  0  0  8  8      4   3    4.5  4.5   8 | 6, then 3 to the lighter rank, 2 to the other: {0 2} {1 3}
//   3  0  0  8  8      2   1.5  6.25 6.25  unchanged
//   4                                      3 | 2, then 0 to the first, 1 to the second: {3 0} {2 1}
TEST(EplbEma, PlacesEveryPeriodByTheMovingAverage) {
  const LoadTable load = load_of(2, {{8, 6, 1, 1}, {8, 6, 1, 1}, {0, 0, 8, 8}, {0, 0, 8, 8}, {1, 1, 1, 1}});
  const StepPlan plan = plan_of(*make_eplb_ema({.decay = 0.5, .period = 2}), {.load = load, .guest_slots = 0});
  for (const int t : {0, 1}) {
    EXPECT_THAT(experts(plan, t, 0), ElementsAre(0, 1));
    EXPECT_THAT(experts(plan, t, 1), ElementsAre(2, 3));
  }
  for (const int t : {2, 3}) {
    EXPECT_THAT(experts(plan, t, 0), ElementsAre(0, 2));
    EXPECT_THAT(experts(plan, t, 1), ElementsAre(1, 3));  // 3 keeps its slot
  }
  EXPECT_THAT(experts(plan, 4, 0), ElementsAre(0, 3));
  EXPECT_THAT(experts(plan, 4, 1), ElementsAre(1, 2));
}

// The previous step's mean 0 0 8 8 starts the average and places {3 1} {2 0}. After two micro-steps the averages
// 6, 4.5, 2.75, 2.75 give {0 2} {1 3}. If the sum, 0 0 16 16, started the average, the averages 6, 4.5, 4.75, 4.75
// would give {0 1} {3 2}.
TEST(EplbEma, StartsFromThePreviousStepsMean) {
  const LoadTable load = load_of(2, {{8, 6, 1, 1}, {8, 6, 1, 1}, {8, 6, 1, 1}});
  const LoadTable former = load_of(2, {{0, 0, 12, 4}, {0, 0, 4, 12}});
  const StepPlan plan =
      plan_of(*make_eplb_ema({.decay = 0.5, .period = 2}), {.load = load, .guest_slots = 0, .previous_load = &former});
  EXPECT_THAT(experts(plan, 0, 0), ElementsAre(3, 1));
  EXPECT_THAT(experts(plan, 0, 1), ElementsAre(2, 0));
  EXPECT_THAT(experts(plan, 2, 0), ElementsAre(0, 2));
  EXPECT_THAT(experts(plan, 2, 1), ElementsAre(1, 3));
}

TEST(EplbEma, NeverLooksAhead) {
  LoadTable load = test::random_load({.micro_steps = 9, .layers = 1, .ranks = 4, .experts = 16}, 1);
  const StepPlan before = plan_of(*make_eplb_ema({.period = 2}), {.load = load, .guest_slots = 2});
  for (int m = 5; m < 9; ++m) {
    for (Tokens& t : load.load.view()[m].flat()) t = Tokens{1000 - t.value};
  }
  const StepPlan after = plan_of(*make_eplb_ema({.period = 2}), {.load = load, .guest_slots = 2});
  for (int t = 0; t < 6; ++t) {  // placement at 4 uses micro-steps 0 to 3
    EXPECT_TRUE(std::ranges::equal(before.slot_expert.view()[t].flat(), after.slot_expert.view()[t].flat())) << t;
  }
  EXPECT_NE(before.slot_expert, after.slot_expert);
}

TEST(EplbEma, RejectsAPreviousLoadOfAnotherModel) {
  const LoadTable load = test::random_load({.experts = 8}, 1);
  const LoadTable former = test::random_load({.experts = 16}, 1);
  EXPECT_THROW(result_of(*make_eplb_ema(), {.load = load, .previous_load = &former}), InputError);
}

}  // namespace
}  // namespace foremoe
