#include "foremoe/transfer/transfer_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "foremoe/core/error.h"
#include "foremoe/testing/transfer_cluster.h"
#include "foremoe/testing/transfer_schedules.h"

namespace foremoe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

const ExpertLayout kLayout = swiglu_layout(8, 4);

// {rank, layer, expert, buffer, opens, arrives, closes} of every copy.
using Lease = std::array<int, 7>;
std::vector<Lease> leases(const TransferSchedule& schedule) {
  std::vector<Lease> result;
  for (const ScheduledCopy& c : schedule.copies) {
    result.push_back(
        {c.rank.value, c.layer.value, c.expert.value, c.buffer, c.opens.value, c.arrives.value, c.closes.value});
  }
  return result;
}

TransferSchedule schedule_of(const StepPlan& plan, Phase phase, PathChoice path = PathChoice::kAuto, int depth = 2) {
  return make_transfer_schedule(plan, kLayout, {.phase = phase, .path = path, .depth = depth});
}

TEST(TransferSchedule, AStayingGuestIsCopiedOnceAndFreesItsSlotAfterItsLastReader) {
  const StepPlan plan = test::plan_with_guests(Residency::kResident, 1, {{2}, {2}, {3}, {-1}, {3}, {2}});
  EXPECT_THAT(leases(schedule_of(plan, Phase::kRecompute)),
              ElementsAre(Lease{0, 0, 2, 0, 0, 0, 1}, Lease{0, 0, 3, 0, 2, 2, 2}, Lease{0, 0, 3, 0, 3, 4, 4},
                          Lease{0, 0, 2, 0, 5, 5, 5}));
}

TEST(TransferSchedule, ALeaseEndsWithTheBackwardIfBothPassesShareAnEvent) {
  const StepPlan plan = test::plan_with_guests(Residency::kResident, 1, {{2, 3}, {3, 3}});
  // Turns: F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0
  EXPECT_THAT(leases(schedule_of(plan, Phase::kPolicyUpdate)),
              ElementsAre(Lease{0, 0, 2, 0, 0, 0, 3}, Lease{0, 1, 3, 1, 0, 1, 6}, Lease{0, 0, 3, 0, 4, 4, 7}));
}

TEST(TransferSchedule, ASlotMayBeLentBetweenAForwardAndItsBackward) {
  const StepPlan plan = test::plan_with_guests(Residency::kResident, 2, {{2}, {3}, {2}, {3}});  // F0 F1 B0 B1
  EXPECT_THAT(leases(schedule_of(plan, Phase::kPolicyUpdate)),
              ElementsAre(Lease{0, 0, 2, 0, 0, 0, 0}, Lease{0, 0, 3, 0, 1, 1, 1}, Lease{0, 0, 2, 0, 2, 2, 2},
                          Lease{0, 0, 3, 0, 3, 3, 3}));
}

TEST(TransferSchedule, SharedBuffersAreFilledAtEveryTurnInSetsThatAlternate) {
  const StepPlan plan = test::plan_with_guests(Residency::kShared, 1, {{2, 3}, {-1, 3}});
  const TransferSchedule schedule = schedule_of(plan, Phase::kPolicyUpdate, PathChoice::kAuto, 3);
  EXPECT_THAT(leases(schedule),
              ElementsAre(Lease{0, 0, 2, 0, 0, 0, 0}, Lease{0, 1, 3, 1, 0, 1, 1}, Lease{0, 1, 3, 2, 0, 2, 2},
                          Lease{0, 0, 2, 0, 1, 3, 3}, Lease{0, 1, 3, 2, 3, 5, 5}, Lease{0, 1, 3, 0, 4, 6, 6}));
  EXPECT_EQ(schedule.buffers_per_rank, 3);
}

TEST(TransferSchedule, ASharedGuestWithoutQuotaIsNotFetched) {
  StepPlan plan = test::plan_with_guests(Residency::kShared, 1, {{2}, {2}});
  plan.slot_tokens(0, 0, 0, 2) = Tokens{0};
  EXPECT_THAT(leases(schedule_of(plan, Phase::kRecompute)), ElementsAre(Lease{0, 0, 2, 1, 0, 1, 1}));
}

TEST(TransferSchedule, UnderFreeOverwrittenHomesReturnAfterTheLastTurn) {
  const StepPlan plan = test::free_plan({{0, 1, 2, 3}, {2, 1, 0, 3}, {2, 1, 0, 3}});
  const TransferSchedule schedule = schedule_of(plan, Phase::kRecompute);
  EXPECT_THAT(leases(schedule), ElementsAre(Lease{0, 0, 2, 0, 1, 1, 2}, Lease{1, 0, 0, 0, 1, 1, 2},
                                            Lease{0, 0, 0, 0, 3, 3, 3}, Lease{1, 0, 2, 0, 3, 3, 3}));
  EXPECT_THAT(schedule.first_of_turn, ElementsAre(0, 0, 2, 2, 4));
  EXPECT_THAT(schedule.arriving(TurnId{3}), SizeIs(2));
  EXPECT_FALSE(schedule.any_arrives(TurnId{2}));
  EXPECT_THAT(schedule.arena,
              ElementsAre(ElementsAre(ArenaExpert{LayerId{0}, ExpertId{0}}, ArenaExpert{LayerId{0}, ExpertId{2}})));
  EXPECT_EQ(schedule.buffers_per_rank, 2);
}

// Buffers 0 and 1 are a rank's slots; 2, 3 and 4 are its staging buffers, which successive turns use in rotation.
TEST(TransferSchedule, UnderFreeRanksExchangeExpertsThroughStagingBuffers) {
  const StepPlan plan = test::free_plan({{0, 1, 2, 3}, {2, 1, 0, 3}, {2, 1, 0, 3}});
  const TransferSchedule schedule = schedule_of(plan, Phase::kRecompute, PathChoice::kPeer);
  EXPECT_THAT(leases(schedule), ElementsAre(Lease{0, 0, 2, 0, 0, 1, 2}, Lease{1, 0, 0, 0, 0, 1, 2},
                                            Lease{0, 0, 0, 0, 2, 3, 3}, Lease{1, 0, 2, 0, 2, 3, 3}));
  for (const ScheduledCopy& copy : schedule.copies) {
    EXPECT_EQ(copy.path, Path::kPeer);
    EXPECT_EQ(copy.source, RankId{1 - copy.rank.value});
    EXPECT_EQ(copy.source_buffer, 0);
    EXPECT_EQ(copy.staging, copy.arrives == TurnId{1} ? 3 : 2);
  }
  EXPECT_EQ(schedule.buffers_per_rank, 5);
  EXPECT_THAT(schedule.arena, ElementsAre(IsEmpty()));
}

TEST(TransferSchedule, UnderFreeAPeerIsReadOnlyAfterItHasTheExpert) {
  const StepPlan plan = test::free_plan({{2, 1, 0, 3}, {0, 1, 2, 3}});
  EXPECT_THAT(leases(schedule_of(plan, Phase::kRecompute, PathChoice::kPeer, 9)),
              ElementsAre(Lease{0, 0, 2, 0, 0, 0, 0}, Lease{1, 0, 0, 0, 0, 0, 0}, Lease{0, 0, 0, 0, 1, 1, 1},
                          Lease{1, 0, 2, 0, 1, 1, 1}));
}

TEST(TransferSchedule, UnderFreeSourcesPreferTheSameNodeThenTheRankThatSendsLess) {
  // Expert e is at home on rank e. Rank 0 has a replica of expert 2, which the ranks `later` need at the next event.
  const auto sources = [](const std::vector<int>& later, int ranks_per_node) {
    const LoadTable load = test::random_load({.micro_steps = 2, .layers = 1, .ranks = 4, .experts = 4}, 1);
    StepPlan plan = test::random_plan(load, {.residency = Residency::kFree, .guest_slots = 1}, 1);
    plan.ranks_per_node = ranks_per_node;
    for (int t = 0; t < 2; ++t) {
      for (int r = 0; r < 4; ++r) {
        plan.slot_expert(t, 0, r, 0) = ExpertId{r};
        plan.slot_expert(t, 0, r, 1) = r == 0 ? ExpertId{2} : kNoExpert;
      }
    }
    for (const int r : later) plan.slot_expert(1, 0, r, 1) = ExpertId{2};
    std::vector<int> read;
    for (const ScheduledCopy& copy : schedule_of(plan, Phase::kRecompute, PathChoice::kPeer).copies) {
      read.push_back(copy.source.value);
    }
    return read;
  };
  EXPECT_THAT(sources({3}, 4), ElementsAre(2, 0));
  EXPECT_THAT(sources({3}, 2), ElementsAre(2, 2));
  EXPECT_THAT(sources({1, 3}, 4), ElementsAre(2, 0, 2));
}

TEST(TransferSchedule, AHomeDisplacedFromTheStartFreesItsSlotAtOnce) {
  const StepPlan plan = test::free_plan({{2, 1, 0, 3}, {0, 1, 2, 3}});
  EXPECT_THAT(leases(schedule_of(plan, Phase::kRecompute)),
              ElementsAre(Lease{0, 0, 2, 0, 0, 0, 0}, Lease{1, 0, 0, 0, 0, 0, 0}, Lease{0, 0, 0, 0, 1, 1, 1},
                          Lease{1, 0, 2, 0, 1, 1, 1}));
}

TEST(TransferSchedule, AHomeThatWasNotOverwrittenIsNotRestored) {
  const StepPlan plan = test::free_plan({{0, 1, 0, 3}, {-1, 1, 0, 2}, {-1, 1, 0, 3}});
  const TransferSchedule schedule = schedule_of(plan, Phase::kRecompute);
  const auto back = schedule.arriving(TurnId{3});
  ASSERT_EQ(back.size(), 1U);
  EXPECT_EQ(back[0].expert, ExpertId{2});  // expert 0 is in its slot; slot 0 of rank 0 was never overwritten
}

TEST(GuestMemory, MatchesTheBuffersOfEachResidency) {
  const ExpertLayout layout(
      {{.name = "a", .elements = 100}, {.name = "b", .elements = 10, .type = DataType::kBfloat16}});
  ASSERT_EQ(layout.bytes(), Bytes{448 + 64});
  const LoadTable load = test::random_load({.layers = 5}, 1);
  const auto memory = [&](Residency residency, Phase phase) {
    const StepPlan plan = test::random_plan(load, {.residency = residency, .guest_slots = 3}, 1);
    const GuestMemory m =
        guest_memory(plan, layout, make_transfer_schedule(plan, layout, {.phase = phase, .depth = 4}));
    return std::pair(m.weights.value, m.gradients.value);
  };
  for (const Residency residency : {Residency::kStatic, Residency::kResident}) {
    EXPECT_EQ(memory(residency, Phase::kRecompute), std::pair(3L * 5 * 512, 0L));
    EXPECT_EQ(memory(residency, Phase::kPolicyUpdate), std::pair(3L * 5 * 512, 3L * 5 * 110 * 4));
  }
  EXPECT_EQ(memory(Residency::kShared, Phase::kRecompute), std::pair(4L * 3 * 512, 0L));
  EXPECT_EQ(memory(Residency::kShared, Phase::kPolicyUpdate), std::pair(4L * 3 * 512, 3L * 110 * 4));
  EXPECT_EQ(memory(Residency::kFree, Phase::kRecompute), std::pair(3L * 5 * 512, 0L));
}

TEST(GuestMemory, UnderFreeFromPeersIncludesStagingBuffers) {
  // Rank 0 receives two experts at once at first, and at most one later.
  const StepPlan plan = test::free_plan({{2, 3, 0, 1}, {2, 1, 0, 3}});
  const ScheduleOptions options{.path = PathChoice::kPeer, .depth = 3};
  const GuestMemory m = guest_memory(plan, kLayout, make_transfer_schedule(plan, kLayout, options));
  EXPECT_EQ(m.weights, Bytes{(plan.guest_slots * plan.num_layers() + (3 + 1) * 2) * kLayout.bytes().value});
}

std::string refusal(const StepPlan& plan, const ScheduleOptions& options) {
  try {
    make_transfer_schedule(plan, kLayout, options);
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(TransferSchedule, RejectsAPhaseThatThePlanDoesNotSupport) {
  EXPECT_THAT(refusal(test::plan_with_guests(Residency::kResident, 2, {{2}, {2}}), {.phase = Phase::kRecompute}),
              HasSubstr("event_pass[1]"));
  EXPECT_THAT(refusal(test::free_plan({{0, 1, 2, 3}}), {.phase = Phase::kPolicyUpdate}), HasSubstr("residency"));
}

TEST(TransferSchedule, RejectsDepthZero) {
  EXPECT_THAT(refusal(test::plan_with_guests(Residency::kShared, 1, {{2}}), {.depth = 0}), HasSubstr("depth: 0"));
}

TEST(TransferSchedule, RejectsAnExpertThatChangesItsSlotWithItsIndex) {
  EXPECT_THAT(refusal(test::free_plan({{0, 1, 2, 3}, {1, 0, 2, 3}}), {}), HasSubstr("slot_expert[1, 0, 0, 0]"));
}

TEST(TransferSchedule, RejectsAGuestInAPinnedHomeSlotWithItsIndex) {
  StepPlan plan = test::plan_with_guests(Residency::kResident, 1, {{-1}, {-1}});
  plan.slot_expert(1, 0, 0, 1) = ExpertId{3};
  EXPECT_THAT(refusal(plan, {}), HasSubstr("slot_expert[1, 0, 0, 1]"));
}

TEST(TransferSchedule, HasNoCopiesWithoutGuests) {
  const LoadTable load = test::random_load({}, 1);
  const TransferSchedule schedule = schedule_of(test::random_plan(load, {.guest_slots = 0}, 1), Phase::kPolicyUpdate);
  EXPECT_THAT(schedule.copies, IsEmpty());
  EXPECT_THAT(schedule.arena, ElementsAre(IsEmpty(), IsEmpty()));
  EXPECT_EQ(schedule.buffers_per_rank, 0);
}

// Two micro-steps of two layers: F0 F1 B1 B0 F0 F1 B1 B0.
LayerTurns two_layers() { return LayerTurns(test::turn_order({.micro_steps = 2, .layers = 2, .backward = true})); }

TEST(LayerTurns, FindsTheNextTurnOfALayer) {
  const LayerTurns turns = two_layers();
  EXPECT_EQ(turns.next(LayerId{0}, TurnId{0}), TurnId{3});
  EXPECT_EQ(turns.next(LayerId{0}, TurnId{3}), TurnId{4});
  EXPECT_EQ(turns.next(LayerId{1}, TurnId{0}), TurnId{1});
  EXPECT_EQ(turns.next(LayerId{1}, TurnId{6}), std::nullopt);
}

TEST(LayerTurns, ALeaseNeedsTheSegmentsThatItsTurnsRead) {
  const LayerTurns turns = two_layers();
  const Segment forward{.name = "forward", .elements = 1, .in_backward = false};
  const Segment backward{.name = "backward", .elements = 1, .in_forward = false};
  const auto lease = [](int arrives, int closes) {
    return ScheduledCopy{.layer = LayerId{1}, .arrives = TurnId{arrives}, .closes = TurnId{closes}};
  };
  EXPECT_TRUE(turns.needs(lease(1, 1), forward));
  EXPECT_FALSE(turns.needs(lease(1, 1), backward));
  EXPECT_FALSE(turns.needs(lease(2, 2), forward));
  EXPECT_TRUE(turns.needs(lease(2, 2), backward));
  EXPECT_TRUE(turns.needs(lease(2, 5), forward));
  EXPECT_TRUE(turns.needs(lease(1, 5), backward));
  EXPECT_TRUE(turns.needs(lease(8, 8), forward)) << "homes that are copied back";
  EXPECT_TRUE(turns.needs(lease(8, 8), backward));
}

}  // namespace
}  // namespace foremoe
