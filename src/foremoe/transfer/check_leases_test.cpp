// Errors that check_leases must find. transfer_schedule_properties_test.cpp tests that it accepts correct schedules.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "foremoe/testing/transfer_schedules.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

class SpoiledSchedule : public testing::Test {
 protected:
  // Two layers whose passes share events. Guests of rank 0: expert 2, then 3, in layer 0; always 3 in layer 1.
  StepPlan plan_ = test::plan_with_guests(Residency::kResident, 1, {{2, 3}, {3, 3}});
  StepPlan shared_ = test::plan_with_guests(Residency::kShared, 1, {{2, 3}, {3, 3}});
  StepPlan free_ = test::free_plan({{0, 1, 2, 3}, {2, 1, 0, 3}, {2, 1, 0, 3}});

  static TransferSchedule schedule_of(const StepPlan& plan) {
    const Phase phase = plan.residency == Residency::kFree ? Phase::kRecompute : Phase::kPolicyUpdate;
    return make_transfer_schedule(plan, swiglu_layout(8, 4), {.phase = phase, .path = PathChoice::kHost});
  }

  static void finds(const StepPlan& plan, const std::string& what,
                    const std::function<void(TransferSchedule&)>& spoil) {
    TransferSchedule schedule = schedule_of(plan);
    ASSERT_THAT(check_leases(schedule, plan), IsEmpty());
    spoil(schedule);
    EXPECT_THAT(check_leases(schedule, plan), Contains(HasSubstr(what)));
  }

  static void drop(TransferSchedule& schedule, std::size_t copy) {
    schedule.copies.erase(schedule.copies.begin() + static_cast<std::ptrdiff_t>(copy));
    recount(schedule);
  }

  static void recount(TransferSchedule& schedule) {
    for (std::size_t t = 0; t < schedule.first_of_turn.size(); ++t) {
      schedule.first_of_turn[t] = static_cast<std::size_t>(
          std::ranges::count_if(schedule.copies, [&](const ScheduledCopy& c) { return c.arrives.index() < t; }));
    }
  }
};

TEST_F(SpoiledSchedule, BufferOverwrittenBeforeItsLastReader) {
  finds(plan_, "may begin at turn 3", [](TransferSchedule& s) { s.copies[2].opens = TurnId{3}; });
  finds(plan_, "may overwrite from turn 3", [](TransferSchedule& s) { s.copies[2].opens = TurnId{3}; });
  finds(shared_, "may begin at turn 0", [](TransferSchedule& s) { s.copies[2].opens = TurnId{0}; });
}

TEST_F(SpoiledSchedule, HomeOverwrittenBeforeItsLastReader) {
  finds(free_, "turn 0 reads expert 0", [](TransferSchedule& s) { s.copies[0].opens = TurnId{0}; });
}

TEST_F(SpoiledSchedule, LeaseThatClosesBeforeItsLastReader) {
  finds(plan_, "whose lease closes at turn 0", [](TransferSchedule& s) { s.copies[0].closes = TurnId{0}; });
}

TEST_F(SpoiledSchedule, LeaseLongerThanThePlanKeepsTheExpert) {
  finds(plan_, "leased at turn 4", [](TransferSchedule& s) { s.copies[0].closes = TurnId{4}; });
  finds(plan_, "another layer's", [](TransferSchedule& s) { s.copies[1].closes = TurnId{7}; });
}

TEST_F(SpoiledSchedule, CopyThatArrivesAfterItsFirstReader) {
  finds(plan_, "turn 0 reads expert 2", [](TransferSchedule& s) {
    s.copies[0].arrives = TurnId{3};
    std::swap(s.copies[0], s.copies[1]);
    recount(s);
  });
}

TEST_F(SpoiledSchedule, MissingCopy) {
  finds(plan_, "turn 4 reads expert 3", [](TransferSchedule& s) { drop(s, 2); });
  finds(shared_, "turn 2 reads expert 3", [](TransferSchedule& s) { drop(s, 2); });
  finds(free_, "does not come back", [](TransferSchedule& s) { drop(s, 3); });
}

TEST_F(SpoiledSchedule, CopyOfAnotherExpert) {
  finds(plan_, "which no copy has put there", [](TransferSchedule& s) { s.copies[0].expert = ExpertId{3}; });
}

TEST_F(SpoiledSchedule, UnneededCopy) {
  finds(plan_, "the rank has it already", [](TransferSchedule& s) {
    ScheduledCopy again = s.copies[1];  // fetches the guest of layer 1 again, although it stays for the second event
    s.copies[1].closes = TurnId{2};
    again.opens = TurnId{3};
    again.arrives = TurnId{5};
    s.copies.push_back(again);
    recount(s);
  });
  StepPlan idle = shared_;
  TransferSchedule schedule = schedule_of(idle);
  idle.slot_tokens(0, 0, 0, 2) = Tokens{0};
  EXPECT_THAT(check_leases(schedule, idle), Contains(HasSubstr("no quota")));
  finds(free_, "no home that was overwritten", [](TransferSchedule& s) {
    ScheduledCopy back = s.copies[2];
    back.expert = ExpertId{1};
    back.slot = SlotId{1};
    back.buffer = 1;
    s.copies.insert(s.copies.begin() + 3, back);
    recount(s);
  });
}

TEST_F(SpoiledSchedule, DuplicateCopy) {
  finds(plan_, "may begin at turn 0", [](TransferSchedule& s) {
    s.copies.insert(s.copies.begin(), s.copies[0]);
    recount(s);
  });
}

TEST_F(SpoiledSchedule, WrongBuffer) {
  finds(plan_, "goes into buffer 1, not 0", [](TransferSchedule& s) { s.copies[0].buffer = 1; });
  finds(shared_, "goes into buffer 0, not 1", [](TransferSchedule& s) { s.copies[1].buffer = 0; });
  finds(free_, "goes into buffer 1, not 0", [](TransferSchedule& s) { s.copies[0].buffer = 1; });
}

TEST_F(SpoiledSchedule, PinnedHomeAsTarget) {
  finds(plan_, "homes are pinned", [](TransferSchedule& s) { s.copies[0].slot = SlotId{1}; });
}

TEST_F(SpoiledSchedule, IdsAndTurnsOutOfRange) {
  const auto out = [&](const std::function<void(ScheduledCopy&)>& set) {
    finds(plan_, "out of range", [&](TransferSchedule& s) { set(s.copies[0]); });
  };
  out([](ScheduledCopy& c) { c.rank = RankId{2}; });
  out([](ScheduledCopy& c) { c.layer = LayerId{-1}; });
  out([](ScheduledCopy& c) { c.expert = ExpertId{4}; });
  out([](ScheduledCopy& c) { c.slot = SlotId{3}; });
  out([](ScheduledCopy& c) { c.arrives = TurnId{8}; });
  out([](ScheduledCopy& c) { c.opens = TurnId{-1}; });
  finds(plan_, "is free only from turn 5 on", [](TransferSchedule& s) { s.copies[2].opens = TurnId{5}; });
  finds(plan_, "closes at turn 8", [](TransferSchedule& s) { s.copies[2].closes = TurnId{8}; });
  finds(plan_, "closes at turn 3", [](TransferSchedule& s) { s.copies[2].closes = TurnId{3}; });
  finds(plan_, "buffers per rank", [](TransferSchedule& s) { s.buffers_per_rank = 1; });
  finds(plan_, "depth is 0", [](TransferSchedule& s) { s.depth = 0; });
}

TEST_F(SpoiledSchedule, CopiesOutOfOrderOrWrongIndex) {
  finds(plan_, "out of order", [](TransferSchedule& s) { std::swap(s.copies[0], s.copies[1]); });
  finds(plan_, "first_of_turn[1] is 0, not 1", [](TransferSchedule& s) { s.first_of_turn[1] = 0; });
  finds(plan_, "first_of_turn has 9 entries, not 10", [](TransferSchedule& s) { s.first_of_turn.pop_back(); });
}

TEST_F(SpoiledSchedule, SourceThatIsNotTheHome) {
  finds(plan_, "is not its home", [](TransferSchedule& s) { s.copies[0].source = RankId{0}; });
}

// Copies 0 and 1 exchange experts 0 and 2 of ranks 0 and 1 at turn 1; copies 2 and 3 exchange them back after turn 2.
class SpoiledStaging : public SpoiledSchedule {
 protected:
  void finds(const std::string& what, const std::function<void(TransferSchedule&)>& spoil) {
    TransferSchedule schedule = make_transfer_schedule(free_, swiglu_layout(8, 4), {.path = PathChoice::kPeer});
    ASSERT_THAT(check_leases(schedule, free_), IsEmpty());
    spoil(schedule);
    EXPECT_THAT(check_leases(schedule, free_), Contains(HasSubstr(what)));
  }
};

TEST_F(SpoiledStaging, SourceWithoutTheExpert) {
  const std::string what = "does not hold it from turn";
  finds(what, [](TransferSchedule& s) { s.copies[0].source = RankId{0}; });
  finds(what, [](TransferSchedule& s) { s.copies[0].source = RankId{2}; });
  finds(what, [](TransferSchedule& s) { s.copies[0].source_buffer = 1; });
  finds(what, [](TransferSchedule& s) { s.copies[0].source_buffer = -1; });
  finds(what, [](TransferSchedule& s) { s.copies[2].opens = TurnId{1}; });  // received there at the end of turn 1
}

TEST_F(SpoiledStaging, SourceOverwrittenBeforeItIsRead) {
  finds("buffer 0 of rank 1 does not hold it", [](TransferSchedule& s) {
    s.copies[1].path = Path::kHost;  // writes the slot directly while rank 0 reads it
    s.copies[1].staging = -1;
    s.arena = {{{LayerId{0}, ExpertId{0}}}};
  });
}

TEST_F(SpoiledStaging, OccupiedStagingBuffer) {
  finds("stays in its staging buffer until turn 1", [](TransferSchedule& s) {
    s.copies[2].staging = s.copies[0].staging;
    s.copies[2].opens = TurnId{1};
  });
}

TEST_F(SpoiledStaging, InvalidStagingBuffer) {
  finds("buffer 0, which is not a staging buffer", [](TransferSchedule& s) { s.copies[0].staging = 0; });
  finds("buffer 5, which is not a staging buffer", [](TransferSchedule& s) { s.copies[0].staging = 5; });
  finds("though it arrives where it is read", [](TransferSchedule& s) { s.copies[0].path = Path::kHost; });
  finds("staging buffers for this turn and each of the depth", [](TransferSchedule& s) { s.buffers_per_rank = 2; });
  finds("staging buffers for this turn and each of the depth", [](TransferSchedule& s) { s.buffers_per_rank = 6; });
}

TEST_F(SpoiledStaging, HomeReturningAtAnotherLayersTurn) {
  finds("out of range", [](TransferSchedule& s) {
    s.copies[3].arrives = s.copies[3].closes = TurnId{4};
    index_copies(s);
  });
  const LoadTable load = test::random_load({.micro_steps = 3, .layers = 2, .ranks = 2, .experts = 4}, 3);
  const StepPlan plan = test::random_plan(load, {.residency = Residency::kFree, .guest_slots = 0}, 3);
  TransferSchedule schedule = make_transfer_schedule(plan, swiglu_layout(8, 4), {.path = PathChoice::kPeer});
  ASSERT_THAT(check_leases(schedule, plan), IsEmpty());
  ScheduledCopy& last = schedule.copies.back();
  ASSERT_EQ(last.arrives, TurnId{schedule.order.size() + 1}) << "of the second layer";
  last.arrives = last.closes = TurnId{schedule.order.size()};
  std::ranges::stable_sort(schedule.copies, {}, &ScheduledCopy::arrives);
  index_copies(schedule);
  EXPECT_THAT(check_leases(schedule, plan), Contains(HasSubstr("its layer's homes come back at turn 7")));
}

TEST_F(SpoiledStaging, SlotReplacedWhileItIsRead) {
  finds("may begin at turn 2, but buffer 0", [](TransferSchedule& s) {
    s.copies[2].arrives = s.copies[2].closes = TurnId{2};
    index_copies(s);
  });
}

TEST_F(SpoiledSchedule, ArenaWithTooMuchOrTooLittle) {
  const std::string what = "arena of node 0";
  finds(plan_, what, [](TransferSchedule& s) { s.arena[0].push_back({LayerId{1}, ExpertId{0}}); });
  finds(plan_, what, [](TransferSchedule& s) { s.arena[0].pop_back(); });
  finds(plan_, what, [](TransferSchedule& s) { std::swap(s.arena[0][0], s.arena[0][1]); });
  finds(plan_, what, [](TransferSchedule& s) {
    for (ScheduledCopy& c : s.copies) c.path = Path::kPeer;
  });
  finds(plan_, "2 arenas on 1 nodes", [](TransferSchedule& s) { s.arena.emplace_back(); });
}

TEST_F(SpoiledSchedule, TurnsThatDoNotMatchThePlan) {
  finds(plan_, "not those of the plan", [](TransferSchedule& s) { std::swap(s.order.turns[0], s.order.turns[1]); });
  finds(plan_, "not those of the plan", [](TransferSchedule& s) { s.phase = Phase::kRecompute; });
  finds(plan_, "table of forward turns", [](TransferSchedule& s) { s.order.forward(0, 0) = TurnId{1}; });
  finds(plan_, "table of backward turns", [](TransferSchedule& s) { s.order.backward = {}; });
  finds(plan_, "first and last", [](TransferSchedule& s) { s.order.last(1, 0) = TurnId{4}; });
  const StepPlan passes_apart = test::plan_with_guests(Residency::kResident, 2, {{2}, {3}, {2}, {3}});
  finds(passes_apart, "recompute under the plan", [](TransferSchedule& t) { t.phase = Phase::kRecompute; });
  finds(free_, "no policy_update", [](TransferSchedule& s) { s.phase = Phase::kPolicyUpdate; });
}

}  // namespace
}  // namespace foremoe
