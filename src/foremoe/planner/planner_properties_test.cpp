// Tests relations between plans with different budgets, preferences, numbers of slots, names of ranks and experts, and
// numbers of threads. Streamed micro-steps are final.

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>

#include "foremoe/core/random.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/same_plan.h"

namespace foremoe {
namespace {

using test::bursty_load;
using test::plan_checked;
using test::Planned;

// Mean of ρ − 1 over all seeds.
double mean_imbalance(const PlannerOptions& options, const test::StepShape& shape, int seeds = 8) {
  double sum = 0;
  for (int seed = 1; seed <= seeds; ++seed) {
    sum += plan_checked(bursty_load(shape, static_cast<std::uint64_t>(seed)), options).figures.rho.mean;
  }
  return sum / seeds - 1;
}

constexpr test::StepShape kEightRanks{.micro_steps = 8, .ranks = 8, .experts = 32, .ranks_per_node = 4};

class ForEachResidency : public testing::TestWithParam<Residency> {
 protected:
  PlannerOptions options(int guest_slots) const { return {.guest_slots = guest_slots, .residency = GetParam()}; }
};

INSTANTIATE_TEST_SUITE_P(Of, ForEachResidency, testing::ValuesIn(test::kAllResidencies),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// check_plan checks each plan's budgets; this test checks the balance that they allow.
TEST_P(ForEachResidency, BalancesWithinItsBudgets) {
  const double at_homes = mean_imbalance({.guest_slots = 0}, kEightRanks, 4);
  const double unlimited = mean_imbalance(options(3), kEightRanks, 4);
  for (const int in_flight : {1, 2, 4}) {
    if (GetParam() == Residency::kFree && in_flight > 1) continue;
    for (const int limit : {0, 1, 2}) {
      for (const bool per_rank : {true, false}) {
        PlannerOptions o = options(3);
        o.in_flight = in_flight;
        (per_rank ? o.max_copies_per_rank.emplace() : o.max_copies_per_source) = limit;
        const double imbalance = mean_imbalance(o, kEightRanks, 4);
        EXPECT_LE(imbalance, at_homes + 1e-9) << to_json(o);
        EXPECT_GE(imbalance, unlimited - 0.005) << to_json(o);
        if (limit > 0) {
          EXPECT_LE(imbalance, 0.7 * at_homes) << to_json(o);
        }
      }
    }
  }
}

TEST_P(ForEachResidency, CopiesNothingWithABudgetOfZero) {
  const LoadTable load = bursty_load(kEightRanks, 1);
  for (const bool per_rank : {true, false}) {
    PlannerOptions o = options(2);
    (per_rank ? o.max_copies_per_rank.emplace() : o.max_copies_per_source) = 0;
    EXPECT_EQ(plan_checked(load, o).figures.copies, 0) << to_json(o);
  }
}

TEST_P(ForEachResidency, RespectsAllBudgetsWithAnyStagesOff) {
  const LoadTable load = bursty_load(kEightRanks, 2);
  for (int bits = 0; bits < 16; ++bits) {
    PlannerOptions o = options(2);
    o.max_copies_per_rank = 1;
    o.max_copies_per_source = 2;
    o.stages = {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
    // Under `free`, L may leave an expert's only replica away from home, and that replica may have fewer tokens.
    if (GetParam() != Residency::kFree || !o.stages.relocation) o.min_tokens_per_guest = 30;
    plan_checked(load, o);
  }
}

TEST_P(ForEachResidency, GivesNoGuestFewerTokensThanTheMinimum) {
  PlannerOptions o = options(2);
  o.stages.relocation = GetParam() != Residency::kFree;
  double before = mean_imbalance(o, kEightRanks, 4);
  for (const std::int64_t least : {1, 16, 64, 1000000}) {
    o.min_tokens_per_guest = least;
    const double imbalance = mean_imbalance(o, kEightRanks, 4);
    EXPECT_GE(imbalance, before - 0.01);
    before = imbalance;
  }
  EXPECT_DOUBLE_EQ(before, mean_imbalance({.guest_slots = 0}, kEightRanks, 4)) << "no guest can have a million";
}

TEST_P(ForEachResidency, IsNoWorseWithAnAdditionalGuestSlot) {
  for (const test::StepShape& shape : {kEightRanks, test::StepShape{.ranks = 6, .experts = 6, .ranks_per_node = 6},
                                       test::StepShape{.ranks = 3, .experts = 24, .ranks_per_node = 3}}) {
    double before = mean_imbalance(options(0), shape);
    for (int guest_slots = 1; guest_slots <= 4; ++guest_slots) {
      const double imbalance = mean_imbalance(options(guest_slots), shape);
      EXPECT_LE(1 + imbalance, 1.005 * (1 + before)) << shape.ranks << " ranks, G = " << guest_slots;
      before = imbalance;
    }
  }
}

// Permutes the ranks together with their homes, and the experts of each rank.
LoadTable renamed(const LoadTable& load, std::uint64_t seed) {
  const int ranks = load.num_ranks();
  const int homes = load.num_experts() / ranks;
  Random random(seed);
  const auto shuffled = [&](int n) {
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    for (int i = n - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    return order;
  };
  const std::vector<int> rank_name = shuffled(ranks);
  std::vector<int> name(load.num_experts());
  for (int r = 0; r < ranks; ++r) {
    const std::vector<int> within = shuffled(homes);
    for (int h = 0; h < homes; ++h) name[r * homes + h] = rank_name[r] * homes + within[h];
  }
  LoadTable other = load;
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    for (int l = 0; l < load.num_layers(); ++l) {
      for (int r = 0; r < ranks; ++r) {
        for (int e = 0; e < load.num_experts(); ++e) other.load(m, l, rank_name[r], name[e]) = load.load(m, l, r, e);
      }
    }
  }
  return other;
}

TEST_P(ForEachResidency, IsEquallyGoodOnAverageAfterRenaming) {
  for (const int guest_slots : {1, 2}) {
    double rho = 0;
    double other = 0;
    double copies = 0;
    double other_copies = 0;
    for (std::uint64_t seed = 1; seed <= 16; ++seed) {
      const LoadTable load = bursty_load(kEightRanks, seed);
      const PlanFigures figures = plan_checked(load, options(guest_slots)).figures;
      const PlanFigures other_figures = plan_checked(renamed(load, seed), options(guest_slots)).figures;
      rho += figures.rho.mean;
      other += other_figures.rho.mean;
      copies += static_cast<double>(figures.copies);
      other_copies += static_cast<double>(other_figures.copies);
    }
    EXPECT_NEAR(other / rho, 1, 0.01);
    EXPECT_NEAR(other_copies / copies, 1, 0.05);
  }
}

TEST_P(ForEachResidency, PreferringLinksCostsAtMostTheToleranceAndSavesTraffic) {
  double balance = 0;
  double links = 0;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    const LoadTable load = bursty_load(kEightRanks, seed);
    PlannerOptions o = options(2);
    o.tolerance = 0.02;
    const Planned balanced = plan_checked(load, o);
    o.prefer = Prefer::kLinks;
    const Planned linked = plan_checked(load, o);
    EXPECT_LE(linked.figures.rho.mean, 1.02 * balanced.figures.rho.mean);
    EXPECT_LE(linked.figures.rho.max, 1.03 * balanced.figures.rho.max);
    balance += balanced.figures.node_link_tokens.mean;
    links += linked.figures.node_link_tokens.mean;
  }
  EXPECT_LT(links, balance);
}

TEST_P(ForEachResidency, MovesAtMostTheAllowedNumberOfHomes) {
  const LoadTable load = bursty_load({.layers = 2, .ranks = 8, .experts = 32}, 3);
  double before = plan_checked(load, {.guest_slots = 0}).figures.rho.mean;
  for (const int moves : {0, 1, 2, 5, 8, kNoLimit}) {
    PlannerOptions o = options(1);
    o.rehome = moves;
    const PlanFigures figures = plan_checked(load, o).figures;  // check_plan counts the moves of each layer
    if (moves < 2) {
      EXPECT_EQ(figures.home_moves, 0) << "one expert cannot move alone";
    }
    o.guest_slots = 0;
    const double at_homes = plan_checked(load, o).figures.rho.mean;
    if (GetParam() != Residency::kFree) {
      EXPECT_LE(at_homes, before + 0.01) << moves << " moves";
    }
    before = at_homes;
  }
}

TEST_P(ForEachResidency, AcceptsAPreviousPlanWithAnyNumberOfSlots) {
  const LoadTable load = bursty_load({.layers = 2, .ranks = 8, .experts = 32}, 4);
  const LoadTable former_load = bursty_load({.micro_steps = 9, .layers = 2, .ranks = 8, .experts = 32}, 5);
  const double cold = plan_checked(load, options(2)).figures.rho.mean;
  for (const Residency former_residency : test::kAllResidencies) {
    for (const int former_slots : {0, 1, 2, 5}) {
      for (const int rehome : {0, 6}) {
        const PlannerOptions former{.guest_slots = former_slots, .residency = former_residency, .rehome = rehome};
        const StepPlan previous = plan_checked(former_load, former).plan;
        const Planned warm = plan_checked(load, options(2), {.previous = &previous});
        EXPECT_LE(warm.figures.rho.mean, 1.05 * cold) << to_json(former);
      }
    }
  }
}

// Two steps with drifting popularity. Compares copies and loads of the second with and without the first one's plan.
TEST_P(ForEachResidency, IsNeverWorseWithAPreviousPlan) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const test::StepShape shape{.micro_steps = 5, .layers = 2, .ranks = seed % 2 == 0 ? 4 : 8, .experts = 24};
    const LoadTable former = bursty_load(shape, seed);
    const LoadTable drawn_anew = bursty_load(shape, 100 + seed);
    LoadTable load = former;
    const auto& change = drawn_anew.load.flat();
    std::size_t i = 0;
    for (Tokens& tokens : load.load.flat()) {
      tokens = Tokens{(tokens.value * (4 - static_cast<std::int64_t>(seed) % 5) +
                       change[i++].value * (static_cast<std::int64_t>(seed) % 5)) /
                      4};
    }
    const StepPlan previous = plan_checked(former, options(1)).plan;
    const Planned cold = plan_checked(load, options(1));
    const Planned warm = plan_checked(load, options(1), {.previous = &previous});
    EXPECT_LE(warm.figures.copies, cold.figures.copies) << "seed " << seed;
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      for (int l = 0; l < load.num_layers(); ++l) {
        const auto tolerated = static_cast<std::int64_t>(static_cast<double>(cold.plan.lower_bound(m, l).value) *
                                                         (1 + default_tolerance(GetParam())));
        EXPECT_LE(warm.plan.max_load(m, l).value, std::max(tolerated, cold.plan.max_load(m, l).value))
            << "seed " << seed << ", micro-step " << m << ", layer " << l;
      }
    }
  }
}

// One thread, fewer threads than layers, and more threads than layers.
class PlanningOnThreads : public testing::TestWithParam<Residency> {};

INSTANTIATE_TEST_SUITE_P(Of, PlanningOnThreads, testing::ValuesIn(test::kAllResidencies),
                         [](const auto& param) { return std::string(to_string(param.param)); });

TEST_P(PlanningOnThreads, ReturnsTheSamePlanForAnyNumberOfThreads) {
  const LoadTable load = bursty_load({.micro_steps = 4, .layers = 5, .ranks = 8, .experts = 32}, 6);
  for (const int in_flight : {1, 2}) {
    if (GetParam() == Residency::kFree && in_flight > 1) continue;
    const PlannerOptions options{
        .guest_slots = 2, .residency = GetParam(), .in_flight = in_flight, .rehome = 4, .max_copies_per_source = 3};
    const StepPlan once = plan_checked(load, options, {.threads = 1}).plan;
    for (const std::size_t threads : {1, 2, 7}) {
      SCOPED_TRACE(threads);
      test::expect_same_plan(plan_checked(load, options, {.threads = threads}).plan, once);
    }
  }
}

// The part of a plan that concerns one micro-step.
struct Part {
  std::vector<ExpertId> experts;
  std::vector<Tokens> tokens;
  std::vector<Tokens> loads;
  std::vector<RankId> home;

  friend bool operator==(const Part&, const Part&) = default;
};

Part part_of(const StepPlan& plan, int m) {
  Part part;
  for (int t = 0; t < plan.num_events(); ++t) {
    if (plan.event_micro_step[t] != MicroStepId{m}) continue;
    std::ranges::copy(plan.slot_expert[t].flat(), std::back_inserter(part.experts));
    std::ranges::copy(plan.slot_tokens[t].flat(), std::back_inserter(part.tokens));
  }
  std::ranges::copy(plan.max_load.row(m), std::back_inserter(part.loads));
  std::ranges::copy(plan.lower_bound.row(m), std::back_inserter(part.loads));
  std::ranges::copy(plan.home.flat(), std::back_inserter(part.home));
  return part;
}

TEST_P(PlanningOnThreads, StreamsFinalMicroStepsInOrder) {
  const LoadTable load = bursty_load({.micro_steps = 6, .layers = 3, .ranks = 4, .experts = 16}, 7);
  const Array<RankId, 2> home = contiguous_homes(3, 16, 4);
  for (const int in_flight : {1, 3, 9}) {
    if (GetParam() == Residency::kFree && in_flight > 1) continue;
    ThreadPool pool(2);
    std::vector<Part> streamed;
    const StepPlan plan =
        plan_step({.load = load,
                   .home = home,
                   .options = {.guest_slots = 2, .residency = GetParam(), .in_flight = in_flight, .rehome = 4},
                   .on_micro_step =
                       [&](const StepPlan& so_far, MicroStepId m) {
                         ASSERT_EQ(m.index(), streamed.size());
                         streamed.push_back(part_of(so_far, m.value));
                         for (int i = 0; i < m.value; ++i) ASSERT_EQ(part_of(so_far, i), streamed[i]);
                       }},
                  pool)
            .plan;
    ASSERT_EQ(std::ssize(streamed), load.num_micro_steps());
    for (int m = 0; m < load.num_micro_steps(); ++m) EXPECT_EQ(part_of(plan, m), streamed[m]);
  }
}

TEST_P(PlanningOnThreads, RethrowsExceptionsOfTheMicroStepCallback) {
  const LoadTable load = bursty_load({.layers = 3}, 8);
  const Array<RankId, 2> home = contiguous_homes(3, 16, 4);
  ThreadPool pool(2);
  EXPECT_THROW(plan_step({.load = load,
                          .home = home,
                          .options = {.residency = GetParam()},
                          .on_micro_step =
                              [](const StepPlan&, MicroStepId m) {
                                if (m == MicroStepId{2}) throw std::runtime_error("no more");
                              }},
                         pool),
               std::runtime_error);
}

// With the few candidates per change of small groups, ρ would be 1.014 on average and 1.068 at most.
TEST(Planner, BalancesGroupsOfMoreThan64Ranks) {
  const auto planned = plan_checked(
      bursty_load({.micro_steps = 8, .ranks = 128, .experts = 128, .ranks_per_node = 8}, 1), {.guest_slots = 1});
  EXPECT_LE(planned.figures.rho.mean, 1.01);
  EXPECT_LE(planned.figures.rho.max, 1.02);
}

}  // namespace
}  // namespace foremoe
