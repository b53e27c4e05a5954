// Tests that every plan of plan_step passes check_plan, with any stages enabled, in each residency and for unusual
// shapes.

#include "foremoe/planner/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using test::bursty_load;
using test::load_of;
using test::plan_checked;
using test::Planned;

constexpr PlannerStages kNoStage{.base = false, .relocation = false, .replication = false, .tokens = false};

// Expects each largest rank load to be the optimum for the replicas present in all passes.
void expect_exact(const StepPlan& plan, const LoadTable& load) {
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    for (int l = 0; l < load.num_layers(); ++l) {
      std::vector<Tokens> expert_load(load.num_experts());
      std::vector<std::uint32_t> holders(load.num_experts());
      for (int e = 0; e < load.num_experts(); ++e) expert_load[e] = test::expert_load(load, MicroStepId{m}, l, e);
      for (int r = 0; r < load.num_ranks(); ++r) {
        std::vector<int> passes(load.num_experts());
        int num_passes = 0;
        for (int t = 0; t < plan.num_events(); ++t) {
          if (plan.event_micro_step[t] != MicroStepId{m}) continue;
          ++num_passes;
          for (const ExpertId e : plan.slot_expert.row(t, l, r)) {
            if (e != kNoExpert) ++passes[e.index()];
          }
        }
        for (int e = 0; e < load.num_experts(); ++e) {
          if (passes[e] == num_passes) holders[e] |= 1U << r;
        }
      }
      ASSERT_EQ(plan.max_load(m, l), test::density_lower_bound(expert_load, holders, load.num_ranks()))
          << "micro-step " << m << ", layer " << l;
    }
  }
}

class EachResidency : public testing::TestWithParam<std::tuple<Residency, int>> {
 protected:
  PlannerOptions options(int guest_slots) const {
    return {.guest_slots = guest_slots, .residency = std::get<0>(GetParam()), .in_flight = std::get<1>(GetParam())};
  }
};

std::string name_of(const testing::TestParamInfo<std::tuple<Residency, int>>& info) {
  return std::string(to_string(std::get<0>(info.param))) + "_in_flight_" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Of, EachResidency,
                         testing::Combine(testing::ValuesIn(test::kPinnedResidencies), testing::Values(1, 2, 4, 99)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OfForwardStages, EachResidency,
                         testing::Combine(testing::Values(Residency::kFree), testing::Values(1)), name_of);

TEST_P(EachResidency, GivesValidPlansWithExactQuotas) {
  for (const int guest_slots : {0, 1, 2, 3}) {
    const LoadTable load = bursty_load({.layers = 2, .ranks = 8, .experts = 32, .ranks_per_node = 4}, 7);
    expect_exact(plan_checked(load, options(guest_slots)).plan, load);
  }
}

TEST_P(EachResidency, CountsAllPartsOfItsWork) {
  const LoadTable load = bursty_load({.micro_steps = 5, .layers = 3, .ranks = 4, .experts = 16}, 7);
  const Array<RankId, 2> home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  ThreadPool pool(2);
  PlanRequest request{.load = load, .home = home, .options = options(1)};
  std::vector<std::int64_t> done;
  request.on_micro_step = [&](const StepPlan&, MicroStepId) { done.push_back(pool.parts().read().done); };
  const StepPlan first = plan_step(request, pool).plan;
  const auto expect_complete = [&] {
    EXPECT_GT(pool.parts().read().total, 0);
    EXPECT_EQ(pool.parts().read().done, pool.parts().read().total);
  };
  expect_complete();
  EXPECT_TRUE(std::ranges::is_sorted(done));
  EXPECT_LT(done.front(), done.back());
  request.previous = &first;
  plan_step(request, pool);
  expect_complete();
}

TEST_P(EachResidency, IsDefinedForEveryChoiceOfStages) {
  const LoadTable load = bursty_load({.micro_steps = 5, .layers = 1, .ranks = 4, .experts = 12}, 3);
  for (int bits = 0; bits < 16; ++bits) {
    for (const int guest_slots : {0, 1, 2}) {
      PlannerOptions o = options(guest_slots);
      o.stages = {.base = (bits & 1) != 0,
                  .relocation = (bits & 2) != 0,
                  .replication = (bits & 4) != 0,
                  .tokens = (bits & 8) != 0};
      const Planned planned = plan_checked(load, o);
      if (o.stages.tokens) expect_exact(planned.plan, load);
    }
  }
}

TEST_P(EachResidency, ServesEverythingAtHomeWithoutAnyStage) {
  const LoadTable load = bursty_load({}, 3);
  PlannerOptions o = options(2);
  o.stages = kNoStage;
  for (const Prefer prefer : {Prefer::kBalance, Prefer::kLinks, Prefer::kTime}) {
    o.prefer = prefer;
    if (prefer == Prefer::kTime) o.copy_price = 0.1;
    const Planned planned = plan_checked(load, o);
    EXPECT_EQ(planned.figures.copies, 0) << to_string(prefer);
    EXPECT_EQ(planned.figures.rho.mean, plan_checked(load, {.guest_slots = 0}).figures.rho.mean);
  }
}

TEST_P(EachResidency, IsNeverWorseThanHomesAndBetterWhereGuestsHelp) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const LoadTable load = bursty_load({.layers = 2, .ranks = 8, .experts = 32}, seed);
    const StepPlan vanilla = plan_checked(load, {.guest_slots = 0}).plan;
    const Planned planned = plan_checked(load, options(2));
    for (std::size_t pair = 0; pair < vanilla.max_load.size(); ++pair) {
      EXPECT_LE(planned.plan.max_load.flat()[pair], vanilla.max_load.flat()[pair]);
    }
    EXPECT_LT(planned.figures.rho.mean, 1.3);
  }
}

TEST_P(EachResidency, CopiesNothingWhereHomesAreBalanced) {
  const LoadTable load = load_of(4, {{9, 1, 5, 5, 8, 2, 4, 6}, {3, 3, 2, 4, 6, 0, 1, 5}, {0, 0, 0, 0, 0, 0, 0, 0}}, 2);
  const Planned planned = plan_checked(load, options(2));
  EXPECT_EQ(planned.figures.copies, 0);
  EXPECT_EQ(planned.figures.rho.max, 1.0);
}

TEST_P(EachResidency, PlansStepsWithoutLoad) {
  plan_checked(load_of(4, {{0, 0, 0, 0}, {0, 0, 0, 0}}), options(1));
  LoadTable load = bursty_load({.micro_steps = 5, .layers = 3}, 5);
  for (int m = 0; m < 5; ++m) std::ranges::fill(load.load[m][1].flat(), Tokens{0});  // a layer
  std::ranges::fill(load.load[2].flat(), Tokens{0});                                 // a micro-step
  std::ranges::fill(load.load[4].flat(), Tokens{0});                                 // the last one
  const Planned planned = plan_checked(load, options(2));
  EXPECT_EQ(planned.plan.max_load(2, 0), Tokens{0});
  EXPECT_GE(planned.figures.rho.mean, 1.0);
}

TEST_P(EachResidency, PlansOneMicroStepAndOneRank) {
  plan_checked(bursty_load({.micro_steps = 1}, 5), options(2));
  const Planned planned = plan_checked(bursty_load({.ranks = 1, .experts = 8, .ranks_per_node = 1}, 5), options(2));
  EXPECT_EQ(planned.figures.rho.max, 1.0);
  EXPECT_EQ(planned.figures.copies, 0);
}

TEST_P(EachResidency, PlansOneExpertPerRank) {
  const LoadTable load = bursty_load({.ranks = 8, .experts = 8}, 5);
  expect_exact(plan_checked(load, options(1)).plan, load);
}

// top-k = E: a token chooses every expert, so all loads are equal.
TEST_P(EachResidency, PlansTokensThatChooseEveryExpert) {
  LoadTable load = load_of(4, {std::vector<std::int64_t>(8, 40), std::vector<std::int64_t>(8, 12)});
  load.top_k = 8;
  const Planned planned = plan_checked(load, options(1));
  EXPECT_EQ(planned.figures.rho.max, 1.0);
  EXPECT_EQ(planned.figures.copies, 0);
}

// Router collapse: with a guest slot on each rank, all ranks can serve the one expert.
TEST_P(EachResidency, SpreadsOneExpertThatHasAllTokensOverAllRanks) {
  const Planned planned = plan_checked(
      load_of(
          8, {{0, 0, 0, 8000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 1600, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
          4),
      options(1));
  EXPECT_LE(planned.figures.rho.max, 1.01);
  if (planned.plan.residency != Residency::kShared) {
    EXPECT_EQ(planned.figures.copies, 7) << "once fetched, a guest stays";
  }
}

TEST_P(EachResidency, IsExactForLoadsNearTwoToThe31) {
  LoadTable load = bursty_load({.micro_steps = 3, .ranks = 4, .experts = 8}, 5);
  Random random(1);
  for (Tokens& tokens : load.load.flat()) {
    tokens = Tokens{(std::int64_t{1} << 31) - 1 - static_cast<std::int64_t>(random.below(1000))};
    if (random.below(2) == 0) tokens = Tokens{random.below(1000)};
  }
  const Planned planned = plan_checked(load, options(2));
  expect_exact(planned.plan, load);
  EXPECT_LT(planned.figures.rho.mean, 1.1);
}

TEST_P(EachResidency, AcceptsMoreGuestSlotsThanExperts) {
  const LoadTable load = bursty_load({.ranks = 4, .experts = 8}, 5);
  for (const int guest_slots : {6, 8, 13}) {  // all experts without a home on the rank; as many as experts; more
    const Planned planned = plan_checked(load, options(guest_slots));
    expect_exact(planned.plan, load);
    EXPECT_LE(planned.figures.rho.max, 1.02);
  }
}

TEST_P(EachResidency, PlansAnyNumberOfNodes) {
  for (const int ranks_per_node : {1, 2, 3, 4, 5, 6, 7, 64}) {
    LoadTable load = bursty_load({.layers = 2, .ranks = 6, .experts = 12, .ranks_per_node = 1}, 5);
    load.ranks_per_node = ranks_per_node;
    for (const Prefer prefer : {Prefer::kBalance, Prefer::kLinks}) {
      PlannerOptions o = options(1);
      o.prefer = prefer;
      const Planned planned = plan_checked(load, o);
      EXPECT_EQ(planned.plan.ranks_per_node, ranks_per_node);
      if (prefer == Prefer::kBalance) expect_exact(planned.plan, load);
    }
  }
}

TEST_P(EachResidency, PlansLayersOfFewerExperts) {
  LoadTable load = bursty_load({.micro_steps = 3, .layers = 3, .ranks = 4, .experts = 16}, 5);
  load.experts_of_layer = {16, 8, 4};
  for (int m = 0; m < 3; ++m) {
    for (int l = 0; l < 3; ++l) {
      for (int r = 0; r < 4; ++r) {
        for (int e = load.experts_in(LayerId{l}); e < 16; ++e) load.load(m, l, r, e) = Tokens{0};
      }
    }
  }
  const Array<RankId, 2> home = contiguous_homes(load);
  for (int l = 0; l < 3; ++l) {
    const int experts = load.experts_in(LayerId{l});
    std::vector<int> homes_of_rank(4, 0);
    for (int e = 0; e < 16; ++e) {
      if (e < experts) {
        EXPECT_EQ(home(l, e), RankId{e * 4 / experts});
      }
      ++homes_of_rank[home(l, e).index()];
    }
    EXPECT_THAT(homes_of_rank, testing::Each(4)) << "the experts that do not exist fill the homes";
  }
  const StepPlan plan = plan_checked(load, options(1), {.home = &home}).plan;
  EXPECT_TRUE(check_plan(plan, load, {}).ok()) << "homes that are not given are contiguous";
  EXPECT_EQ(plan_figures(plan, load, {}).home_moves, 0);
}

TEST(ContiguousHomes, NeedRanksThatDivideTheExpertsOfEveryLayer) {
  const std::vector<int> experts{16, 6};
  EXPECT_THAT([&] { contiguous_homes(2, 16, 4, experts); },
              testing::ThrowsMessage<InputError>(testing::HasSubstr("4 ranks must divide the 6 experts of layer 1")));
}

TEST_P(EachResidency, KeepsArbitraryHomes) {
  const LoadTable load = bursty_load({.layers = 2, .ranks = 4, .experts = 12}, 5);
  Array<RankId, 2> home({2, 12});
  for (int l = 0; l < 2; ++l) {
    for (int e = 0; e < 12; ++e) home(l, e) = RankId{(e + l) % 4};
  }
  const Planned planned = plan_checked(load, options(1), {.home = &home});
  EXPECT_EQ(planned.plan.home, home);
  EXPECT_EQ(planned.figures.home_moves, 0);
}

TEST(PlannerStages, WithoutTokenAssignmentSplitEveryExpertEqually) {
  const LoadTable load = bursty_load({.ranks = 4, .experts = 12}, 9);
  for (const Residency residency : test::kAllResidencies) {
    PlannerOptions options{.guest_slots = 2, .residency = residency};
    options.stages.tokens = false;
    const StepPlan plan = plan_checked(load, options).plan;
    for (int t = 0; t < plan.num_events(); ++t) {
      for (int e = 0; e < plan.num_experts(); ++e) {
        std::vector<std::int64_t> quotas;
        for (int r = 0; r < plan.num_ranks(); ++r) {
          for (int s = 0; s < plan.num_slots(); ++s) {
            const bool serves = plan.slot_expert(t, 0, r, s) == ExpertId{e} && plan.slot_tokens(t, 0, r, s).value > 0;
            if (serves) quotas.push_back(plan.slot_tokens(t, 0, r, s).value);
          }
        }
        if (quotas.empty()) continue;
        EXPECT_LE(quotas.front() - quotas.back(), 1);
        EXPECT_TRUE(std::ranges::is_sorted(quotas, std::greater<>())) << "the remainder goes to the lowest ranks";
      }
    }
  }
}

TEST(PlannerStages, RelocationAloneMovesWholeExperts) {
  const LoadTable load = bursty_load({.ranks = 4, .experts = 24}, 9);
  for (const Residency residency : {Residency::kResident, Residency::kShared}) {
    PlannerOptions options{.guest_slots = 2, .residency = residency, .stages = kNoStage};
    options.stages.relocation = true;
    const Planned planned = plan_checked(load, options);
    EXPECT_GT(planned.figures.copies, 0);
    EXPECT_LT(planned.figures.rho.mean, plan_checked(load, {.guest_slots = 0}).figures.rho.mean);
    for (int t = 0; t < planned.plan.num_events(); ++t) {
      std::vector<int> serving(load.num_experts());
      for (int r = 0; r < 4; ++r) {
        for (int s = 0; s < planned.plan.num_slots(); ++s) {
          if (planned.plan.slot_tokens(t, 0, r, s).value > 0) ++serving[planned.plan.slot_expert(t, 0, r, s).index()];
        }
      }
      EXPECT_THAT(serving, testing::Each(testing::Le(1)));
    }
  }
}

TEST(PlannerStages, WithoutReplicationKeepTheInitialGuests) {
  const LoadTable load = bursty_load({.ranks = 8, .experts = 32}, 9);
  PlannerOptions options{.guest_slots = 2};
  options.stages.relocation = options.stages.replication = false;
  const StepPlan plan = plan_checked(load, options).plan;
  const int last = plan.num_events() - 1;
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (int s = 0; s < plan.num_slots(); ++s) {
        const ExpertId e = plan.slot_expert(t, 0, r, s);
        EXPECT_TRUE(e == kNoExpert || e == plan.slot_expert(last, 0, r, s)) << "a guest was replaced";
      }
    }
  }
}

TEST(PlannerStages, ReplicationAndTokenAssignmentLowerTheImbalance) {
  double all = 0;
  double without_tokens = 0;
  double without_replication = 0;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const LoadTable load = bursty_load({.ranks = 8, .experts = 32}, seed);
    PlannerOptions options{.guest_slots = 1};
    all += plan_checked(load, options).figures.rho.mean;
    options.stages.tokens = false;
    without_tokens += plan_checked(load, options).figures.rho.mean;
    options.stages.tokens = true;
    options.stages.replication = false;
    without_replication += plan_checked(load, options).figures.rho.mean;
  }
  EXPECT_LT(all, without_replication);
  EXPECT_LT(all, without_tokens);
}

// Quotas and bounds are exact for a load other than the one for which the slots were chosen.
TEST(SplitAnew, KeepsTheSlotsAndServesAnotherLoadExactly) {
  const LoadTable expected = bursty_load({.layers = 2, .ranks = 8, .experts = 32}, 3);
  const LoadTable load = bursty_load({.layers = 2, .ranks = 8, .experts = 32}, 4);
  for (const Residency residency : test::kPinnedResidencies) {
    const StepPlan placed = plan_checked(expected, {.guest_slots = 2, .residency = residency}).plan;
    const StepPlan plan = recompute_quotas(placed, load);
    const CheckReport report = check_plan(plan, load, {.initial_home = plan.home});
    for (const Violation& v : report.violations) ADD_FAILURE() << to_string(v.kind) << ": " << v.message;
    if (residency != Residency::kShared) {
      EXPECT_EQ(plan.slot_expert, placed.slot_expert);
    }
    expect_exact(plan, load);
    EXPECT_EQ(recompute_quotas(placed, expected).slot_tokens, placed.slot_tokens) << "not as it was split first";
  }
}

TEST(SplitAnew, RejectsALoadOfAnotherShape) {
  const StepPlan plan = plan_checked(bursty_load({.micro_steps = 2}, 3), {}).plan;
  try {
    recompute_quotas(plan, bursty_load({.micro_steps = 3}, 3));
    ADD_FAILURE() << "nothing was refused";
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().field, "load");
  }
}

}  // namespace
}  // namespace foremoe
