#include "foremoe/transfer/rank_turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "foremoe/core/error.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

constexpr test::Shape kShape{.micro_steps = 5, .layers = 2, .ranks = 4, .experts = 8, .ranks_per_node = 2};

RankTurns turns_of_rank(const StepPlan& plan, const LoadTable& load, int rank, Phase phase, int depth = 2) {
  return {plan, load, {.rank = RankId{rank}, .schedule = {.phase = phase, .depth = depth}}};
}

struct Case {
  Residency residency;
  int in_flight;
};

class RankTurnsOfRandomPlans : public testing::TestWithParam<Case> {
 protected:
  LoadTable load(std::uint64_t seed) const { return test::random_load(kShape, seed); }
  StepPlan plan(const LoadTable& load, std::uint64_t seed) const {
    return test::random_plan(load, {GetParam().residency, 2, GetParam().in_flight}, seed);
  }
};

TEST_P(RankTurnsOfRandomPlans, BothEndsOfACopyStartItAtTheSameTurnAndInTheSameOrder) {
  for (int seed = 1; seed <= 10; ++seed) {
    const LoadTable table = load(seed);
    const StepPlan step = plan(table, seed);
    for (const int depth : {1, 3}) {
      std::vector<RankTurns> ranks;
      for (int r = 0; r < kShape.ranks; ++r) {
        ranks.push_back(turns_of_rank(step, table, r, Phase::kPolicyUpdate, depth));
      }
      std::map<int, int> seen;  // [copy], number of ranks that start it
      const TransferSchedule& schedule = ranks[0].schedule();
      for (int t = 0; t < schedule.order.size(); ++t) {
        for (int a = 0; a < kShape.ranks; ++a) {
          for (const ScheduledCopy& copy : ranks[a].starting(TurnId{t})) {
            EXPECT_GE(copy.opens, TurnId{0});
            EXPECT_LE(copy.opens, TurnId{t}) << "its buffer is free";
            EXPECT_LE(TurnId{t}, copy.arrives);
            EXPECT_TRUE(t == copy.opens.value || t == copy.arrives.value - depth || t == 0) << "not later than it may";
            ++seen[static_cast<int>(std::ranges::find(schedule.copies, copy) - schedule.copies.begin())];
          }
          for (int b = 0; b < a; ++b) {
            const auto between = [&](const RankTurns& x) {
              std::vector<ScheduledCopy> copies;
              for (const ScheduledCopy& copy : x.starting(TurnId{t})) {
                const std::set<int> ends{copy.rank.value, copy.source.value};
                if (copy.path == Path::kPeer && ends == std::set{a, b}) copies.push_back(copy);
              }
              return copies;
            };
            EXPECT_EQ(between(ranks[a]), between(ranks[b]));
          }
        }
      }
      for (std::size_t i = 0; i < schedule.copies.size(); ++i) {
        EXPECT_EQ(seen[static_cast<int>(i)], schedule.copies[i].path == Path::kPeer ? 2 : 1);
      }
    }
  }
}

TEST_P(RankTurnsOfRandomPlans, ArrivingCopiesAreTheRanksPartOfTheSchedule) {
  const LoadTable table = load(3);
  const StepPlan step = plan(table, 3);
  std::size_t copies = 0;
  for (int r = 0; r < kShape.ranks; ++r) {
    const RankTurns turns = turns_of_rank(step, table, r, Phase::kPolicyUpdate);
    for (int t = 0; t < turns.order().size(); ++t) {
      for (const ScheduledCopy& copy : turns.arriving(TurnId{t})) {
        EXPECT_EQ(copy.rank, RankId{r});
        EXPECT_EQ(copy.arrives, TurnId{t});
        ++copies;
      }
    }
  }
  EXPECT_EQ(copies, turns_of_rank(step, table, 0, Phase::kPolicyUpdate).schedule().copies.size());
  EXPECT_GT(copies, 0U);
}

TEST_P(RankTurnsOfRandomPlans, ATurnFindsTheExpertsOfItsForwardInTheirCurrentSlots) {
  for (int seed = 1; seed <= 5; ++seed) {
    const LoadTable table = load(seed);
    const StepPlan step = plan(table, seed);
    for (int r = 0; r < kShape.ranks; ++r) {
      const RankTurns turns = turns_of_rank(step, table, r, Phase::kPolicyUpdate);
      for (int t = 0; t < turns.order().size(); ++t) {
        const Turn& turn = turns.order()[TurnId{t}];
        const Turn& forward = turns.order()[turns.turn(Pass::kForward, turn.micro_step, turn.layer)];
        for (int s = 0; s < step.num_slots(); ++s) {
          if (step.slot_tokens(forward.event, turn.layer, r, s) == Tokens{0}) continue;
          const SlotId now = turns.slot_of_forward(TurnId{t}, SlotId{s});
          EXPECT_EQ(step.slot_expert(turn.event, turn.layer, r, now),
                    step.slot_expert(forward.event, turn.layer, r, s));
        }
      }
    }
  }
}

// Counts by hand the backward turns that a guest served since it was copied.
TEST_P(RankTurnsOfRandomPlans, EveryGradientGoesHomeOnceBeforeItsSlotIsReused) {
  for (int seed = 1; seed <= 10; ++seed) {
    const LoadTable table = load(seed);
    const StepPlan step = plan(table, seed);
    std::vector<RankTurns> ranks;
    for (int r = 0; r < kShape.ranks; ++r) ranks.push_back(turns_of_rank(step, table, r, Phase::kPolicyUpdate));
    const TurnOrder& order = ranks[0].order();
    const int homes = kShape.experts / kShape.ranks;

    struct Sum {
      ExpertId expert;
      int backwards = 0;
    };
    std::map<std::tuple<int, int, int>, Sum> away;  // (layer, rank, slot)
    int served = 0;
    int returned = 0;
    const auto take = [&](int layer, const std::vector<GradientReturn>& returns, int rank) {
      for (const GradientReturn& g : returns) {
        EXPECT_EQ(g.home, step.home(layer, g.expert));
        EXPECT_TRUE(g.home == RankId{rank} || g.guest == RankId{rank});
        if (g.guest != RankId{rank}) continue;
        Sum& sum = away[{layer, g.guest.value, g.slot.value}];
        EXPECT_EQ(sum.expert, g.expert);
        EXPECT_GT(sum.backwards, 0) << "nothing to send";
        returned += sum.backwards;
        sum = {};
      }
    };
    const auto same_at_both_ends = [&](const std::function<std::vector<GradientReturn>(const RankTurns&)>& of) {
      std::map<std::tuple<int, int, int>, int> ends;
      for (const RankTurns& rank : ranks) {
        for (const GradientReturn& g : of(rank)) ++ends[{g.expert.value, g.guest.value, g.slot.value}];
      }
      for (const auto& [key, n] : ends) EXPECT_EQ(n, 2);
    };
    for (int t = 0; t < order.size(); ++t) {
      const Turn& turn = order[TurnId{t}];
      const int l = turn.layer.value;
      for (int r = 0; r < kShape.ranks; ++r) {
        for (int s = homes; s < step.num_slots(); ++s) {
          if (turn.pass != Pass::kBackward || step.slot_tokens(turn.event, l, r, s) == Tokens{0}) continue;
          Sum& sum = away[{l, r, s}];
          const ExpertId e = step.slot_expert(turn.event, l, r, s);
          EXPECT_TRUE(sum.backwards == 0 || sum.expert == e) << "two experts in one gradient";
          sum = {e, sum.backwards + 1};
          ++served;
        }
      }
      for (int r = 0; r < kShape.ranks; ++r) take(l, ranks[r].returning(TurnId{t}), r);
      same_at_both_ends([&](const RankTurns& rank) { return rank.returning(TurnId{t}); });
    }
    for (int l = 0; l < kShape.layers; ++l) {
      for (int r = 0; r < kShape.ranks; ++r) take(l, ranks[r].draining(LayerId{l}), r);
      same_at_both_ends([&](const RankTurns& rank) { return rank.draining(LayerId{l}); });
    }
    EXPECT_EQ(returned, served);
    EXPECT_GT(served, 0);
    for (const auto& [key, sum] : away) EXPECT_EQ(sum.backwards, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Of, RankTurnsOfRandomPlans,
                         testing::Values(Case{Residency::kStatic, 1}, Case{Residency::kResident, 1},
                                         Case{Residency::kResident, 2}, Case{Residency::kShared, 1},
                                         Case{Residency::kShared, 3}),
                         [](const auto& c) {
                           return std::string(to_string(c.param.residency)) + std::to_string(c.param.in_flight);
                         });

// These classes keep references to their arguments.
static_assert(!std::is_constructible_v<RankTurns, StepPlan, const LoadTable&, const RankTurnsOptions&>);
static_assert(!std::is_constructible_v<RankTurns, const StepPlan&, LoadTable, const RankTurnsOptions&>);
static_assert(std::is_constructible_v<RankTurns, const StepPlan&, const LoadTable&, const RankTurnsOptions&>);
static_assert(!std::is_constructible_v<CopyFinder, StepPlan, LayerId>);
static_assert(!std::is_constructible_v<SourceTokens, RoutingTrace, const Batching&>);

TEST(RankTurns, ReturnNoGradientsInRecompute) {
  const LoadTable load = test::random_load(kShape, 1);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 2}, 1);
  const RankTurns turns = turns_of_rank(plan, load, 1, Phase::kRecompute);
  for (int t = 0; t < turns.order().size(); ++t) EXPECT_TRUE(turns.returning(TurnId{t}).empty());
  EXPECT_TRUE(turns.draining(LayerId{0}).empty());
}

TEST(RankTurns, RowsAtHomesServeEveryExpertThere) {
  const LoadTable load = test::random_load(kShape, 2);
  const StepPlan plan = test::random_plan(load, {.guest_slots = 2}, 2);
  RankDispatchWorkspace workspace;
  RankDispatch rows;
  for (int r = 0; r < kShape.ranks; ++r) {
    const RankTurns turns = turns_of_rank(plan, load, r, Phase::kPolicyUpdate);
    const TurnId t = turns.turn(Pass::kBackward, MicroStepId{1}, LayerId{1});
    turns.rows_at_homes(t, workspace, rows);
    for (int h = 0; h < 2; ++h) {
      EXPECT_EQ(rows.slot_offsets[h + 1] - rows.slot_offsets[h],
                test::expert_load(load, MicroStepId{1}, 1, 2 * r + h).value);
    }
    ASSERT_EQ(rows.num_slots, plan.num_slots());
    ASSERT_EQ(rows.slot_offsets.size(), static_cast<std::size_t>(plan.num_slots()) + 1);
    ASSERT_EQ(rows.received.size(), static_cast<std::size_t>(plan.num_slots() * kShape.ranks));
    for (int guest = 2; guest < plan.num_slots(); ++guest) {
      EXPECT_EQ(rows.slot_offsets[guest + 1], rows.slot_offsets.back()) << "guest slots have no rows";
    }
    turns.rows(t, workspace, rows);
    EXPECT_EQ(rows.slot_offsets.back(), static_cast<std::int64_t>(rows.to_slots.size()));
    EXPECT_EQ(rows.slot_offsets.size(), static_cast<std::size_t>(plan.num_slots()) + 1);
  }
}

TEST(RankTurns, RejectInvalidArgumentsByName) {
  const LoadTable load = test::random_load(kShape, 1);
  const StepPlan plan = test::random_plan(load, {}, 1);
  const auto refusal = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const InputError& error) {
      return error.what();
    }
    return "nothing";
  };
  EXPECT_THAT(refusal([&] { turns_of_rank(plan, load, 4, Phase::kRecompute); }), HasSubstr("rank: 4"));
  EXPECT_THAT(refusal([&] { turns_of_rank(plan, test::random_load({}, 1), 0, Phase::kRecompute); }),
              HasSubstr("load: has shape [3, 2, 4, 8], but the plan is for [5, 2, 4, 8]"));
  EXPECT_THAT(refusal([&] { RankTurns(plan, load, {.rank = RankId{0}, .schedule = {}, .expert = Bytes{0}}); }),
              HasSubstr("expert_bytes"));
  const RankTurns turns = turns_of_rank(plan, load, 0, Phase::kRecompute);
  EXPECT_THAT(refusal([&] { turns.turn(Pass::kBackward, MicroStepId{0}, LayerId{0}); }), HasSubstr("recompute"));
  EXPECT_THAT(refusal([&] { turns.turn(Pass::kForward, MicroStepId{5}, LayerId{0}); }), HasSubstr("micro_step: 5"));
  EXPECT_THAT(refusal([&] { turns.turn(Pass::kForward, MicroStepId{0}, LayerId{-1}); }), HasSubstr("layer: -1"));
}

// The plan that a rank has while planning continues: guest slots of later micro-steps are still empty.
StepPlan without_guests(StepPlan plan) {
  for (int t = 0; t < plan.num_events(); ++t) {
    for (int l = 0; l < plan.num_layers(); ++l) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        std::ranges::fill(plan.slot_expert.row(t, l, r).subspan(plan.num_slots() - plan.guest_slots), kNoExpert);
      }
    }
  }
  return plan;
}

void arrive(const StepPlan& whole, MicroStepId m, StepPlan& plan) {
  for (int t = 0; t < whole.num_events(); ++t) {
    if (whole.event_micro_step[static_cast<std::size_t>(t)] != m) continue;
    std::ranges::copy(whole.slot_expert[t].flat(), plan.slot_expert[t].flat().begin());
  }
}

TEST(LentTurns, EqualTheTurnsOfTheWholePlanAfterAllMicroSteps) {
  const LoadTable load = test::random_load(kShape, 7);
  std::size_t copies = 0;
  for (const int in_flight : {1, 2, 3}) {
    const StepPlan whole = test::random_plan(load, {Residency::kShared, 2, in_flight}, 7);
    for (const int depth : {1, 2, 3, 7}) {
      for (int r = 0; r < kShape.ranks; ++r) {
        RankTurnsOptions options{
            .rank = RankId{r}, .schedule = {.phase = Phase::kPolicyUpdate, .path = PathChoice::kPeer, .depth = depth}};
        const RankTurns all(whole, load, options);
        const TransferSchedule at_once =
            make_transfer_schedule(whole, ExpertLayout({{.name = "expert", .elements = 1}}), options.schedule);
        ASSERT_EQ(all.schedule().copies, at_once.copies);
        ASSERT_EQ(all.schedule().first_of_turn, at_once.first_of_turn);
        ASSERT_EQ(all.schedule().arena, at_once.arena);
        StepPlan plan = without_guests(whole);
        options.planned = 0;
        RankTurns growing(plan, load, options);
        int planned = 0;
        for (int t = 0; t < all.order().size(); ++t) {
          for (; planned <= growing.needed_at(TurnId{t}).value; ++planned) {
            arrive(whole, MicroStepId{planned}, plan);
            growing.lend(planned + 1);
          }
          EXPECT_TRUE(std::ranges::equal(growing.starting(TurnId{t}), all.starting(TurnId{t}))) << "turn " << t;
          EXPECT_TRUE(std::ranges::equal(growing.arriving(TurnId{t}), all.arriving(TurnId{t}))) << "turn " << t;
          copies += all.arriving(TurnId{t}).size();
        }
        EXPECT_EQ(planned, kShape.micro_steps);
        EXPECT_EQ(growing.schedule().copies, all.schedule().copies);
      }
    }
  }
  EXPECT_GT(copies, 100U);
}

// The first call may be for any turn and returns all copies of that turn.
TEST(LentTurns, AreCompleteForAnyFirstTurn) {
  const LoadTable load = test::random_load(kShape, 7);
  const StepPlan whole = test::random_plan(load, {Residency::kShared, 2, 3}, 7);
  RankTurnsOptions options{.rank = RankId{1}, .schedule = {.phase = Phase::kPolicyUpdate, .path = PathChoice::kPeer}};
  const RankTurns all(whole, load, options);
  for (int t = 0; t < all.order().size(); ++t) {
    for (const bool starting : {false, true}) {
      StepPlan plan = without_guests(whole);
      options.planned = 0;
      RankTurns turns(plan, load, options);
      const int needed = (starting ? turns.needed_at(TurnId{t}) : turns.needed_by(TurnId{t})).value;
      for (int m = 0; m <= needed; ++m) arrive(whole, MicroStepId{m}, plan);
      turns.lend(needed + 1);
      const auto asked = [&](const RankTurns& of) {
        return starting ? of.starting(TurnId{t}) : of.arriving(TurnId{t});
      };
      EXPECT_TRUE(std::ranges::equal(asked(turns), asked(all))) << "turn " << t;
    }
  }
}

TEST(LentTurns, NeedOnlyMicroStepsWhoseCopiesStart) {
  const LoadTable load = test::random_load(kShape, 7);
  const StepPlan plan = test::random_plan(load, {Residency::kShared, 2, 1}, 7);
  const RankTurns turns = turns_of_rank(plan, load, 0, Phase::kRecompute, 2);
  EXPECT_EQ(turns.needed_at(TurnId{0}), MicroStepId{0});  // a micro-step has two turns; copies start one turn ahead
  EXPECT_EQ(turns.needed_at(TurnId{1}), MicroStepId{1});
  EXPECT_EQ(turns.needed_at(TurnId{turns.order().size() - 1}), MicroStepId{kShape.micro_steps - 1});
}

}  // namespace
}  // namespace foremoe
