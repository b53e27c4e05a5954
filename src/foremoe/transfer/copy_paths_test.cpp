#include "foremoe/transfer/copy_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "foremoe/testing/transfer_schedules.h"

namespace foremoe {
namespace {

using testing::IsEmpty;

const ExpertLayout kLayout = swiglu_layout(8, 4);

// A guest of a rank at an event of the only layer.
struct Guest {
  int event, rank, expert;
};

// As many ranks as experts, each at home on the rank of its number, one guest slot.
StepPlan plan_with(const std::vector<Guest>& guests, int ranks, int ranks_per_node) {
  int events = 1;
  for (const Guest& g : guests) events = std::max(events, g.event + 1);
  StepPlan plan{.guest_slots = 1, .ranks_per_node = ranks_per_node};
  const auto n = static_cast<std::size_t>(ranks);
  plan.slot_expert = Array<ExpertId, 4>({static_cast<std::size_t>(events), 1, n, 2}, kNoExpert);
  plan.slot_tokens = Array<Tokens, 4>(plan.slot_expert.shape());
  plan.home = Array<RankId, 2>({1, n});
  const ExecutionOrder order = make_execution_order(events, 1);
  plan.event_micro_step = order.micro_step;
  plan.event_pass = order.pass;
  for (int r = 0; r < ranks; ++r) {
    plan.home(0, r) = RankId{r};
    for (int t = 0; t < events; ++t) plan.slot_expert(t, 0, r, 0) = ExpertId{r};
  }
  for (const Guest& g : guests) plan.slot_expert(g.event, 0, g.rank, 1) = ExpertId{g.expert};
  return plan;
}

std::map<Path, int> number_by_path(const TransferSchedule& schedule) {
  std::map<Path, int> number;
  for (const ScheduledCopy& copy : schedule.copies) ++number[copy.path];
  return number;
}

TEST(CopyPaths, AnExpertThatItsNodeFetchesOnceComesFromItsPeer) {
  // Expert 0 is fetched twice, but by two nodes.
  const TransferSchedule schedule = make_transfer_schedule(plan_with({{0, 2, 0}, {0, 4, 0}}, 6, 2), kLayout, {});
  EXPECT_EQ(number_by_path(schedule), (std::map<Path, int>{{Path::kPeer, 2}}));
  EXPECT_THAT(schedule.arena, testing::Each(IsEmpty()));
}

TEST(CopyPaths, TheArenaRelievesARankWhoseExpertEverybodyWants) {
  std::vector<Guest> guests;
  for (int r = 1; r < 8; ++r) guests.push_back({0, r, 0});
  const TransferSchedule schedule = make_transfer_schedule(plan_with(guests, 8, 8), kLayout, {});
  // By turns from the egress of rank 0 and from the arena; the peer where both are equal.
  EXPECT_EQ(number_by_path(schedule), (std::map<Path, int>{{Path::kPeer, 4}, {Path::kHost, 3}}));
  EXPECT_EQ(schedule.arena[0], (std::vector<ArenaExpert>{{LayerId{0}, ExpertId{0}}}));
}

TEST(CopyPaths, ABusyLinkBetweenNodesIsRelievedByTheArena) {
  // Ranks 4 to 7 of the second node fetch four experts of the first, each twice: egress is no bottleneck, the link is.
  std::vector<Guest> guests;
  for (int t = 0; t < 2; ++t) {
    for (int r = 4; r < 8; ++r) guests.push_back({t, r, (r + t) % 4});
  }
  const TransferSchedule schedule = make_transfer_schedule(plan_with(guests, 8, 4), kLayout, {});
  EXPECT_EQ(number_by_path(schedule), (std::map<Path, int>{{Path::kPeer, 4}, {Path::kHost, 4}}));
}

TEST(CopyPaths, NoLinkIsBusierThanWithOnePathAlone) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const LoadTable load =
        test::random_load({.micro_steps = 6, .layers = 3, .ranks = 8, .experts = 16, .ranks_per_node = 4}, seed);
    const StepPlan plan = test::random_plan(load, {.guest_slots = 3}, seed);
    const Topology topology{.num_ranks = 8, .ranks_per_node = 4};
    std::map<PathChoice, int> busiest;  // copies on the busiest link
    for (const PathChoice choice : {PathChoice::kAuto, PathChoice::kHost, PathChoice::kPeer}) {
      std::map<std::pair<std::string, int>, int> links;
      for (const ScheduledCopy& c : make_transfer_schedule(plan, kLayout, {.path = choice}).copies) {
        const int node = topology.node_of(c.rank).value;
        const bool far = topology.node_of(c.source).value != node;
        ++links[{c.path == Path::kHost || far ? "host link" : "node link", c.rank.value}];
        ++links[c.path == Path::kHost ? std::pair<std::string, int>{"arena", node}
                                      : std::pair<std::string, int>{"egress", c.source.value}];
        if (c.path == Path::kPeer && far) ++links[{"to node", node}];
      }
      for (const auto& [link, copies] : links) busiest[choice] = std::max(busiest[choice], copies);
    }
    EXPECT_LE(busiest[PathChoice::kAuto], busiest[PathChoice::kHost]) << "seed " << seed;
    EXPECT_LE(busiest[PathChoice::kAuto], busiest[PathChoice::kPeer]) << "seed " << seed;
  }
}

TEST(CopyPaths, AnArenaHoldsOnlyWhatItsNodeFetchesTwice) {
  for (const test::ScheduleCase& c : test::random_cases(16)) {
    if (c.options.path != PathChoice::kAuto || c.plan.residency == Residency::kFree) continue;
    SCOPED_TRACE(c.name);
    const TransferSchedule schedule = make_transfer_schedule(c.plan, kLayout, c.options);
    for (std::size_t n = 0; n < schedule.arena.size(); ++n) {
      for (const ArenaExpert& expert : schedule.arena[n]) {
        const auto fetched = std::ranges::count_if(schedule.copies, [&](const ScheduledCopy& copy) {
          return copy.rank.index() / c.plan.ranks_per_node == n && ArenaExpert{copy.layer, copy.expert} == expert;
        });
        EXPECT_GE(fetched, 2);
      }
    }
  }
}

TEST(CopyPaths, BytesAreThoseOfThePassThatReads) {
  // Under `shared` with passes of one event the backward's copies are the heavy ones: they decide the balance.
  const ExpertLayout backward_heavy(
      {{.name = "f", .elements = 16, .in_backward = false}, {.name = "b", .elements = 1600, .in_forward = false}});
  StepPlan plan = plan_with({{0, 1, 0}, {0, 2, 0}}, 3, 3);
  plan.residency = Residency::kShared;
  plan.slot_tokens(0, 0, 1, 1) = plan.slot_tokens(0, 0, 2, 1) = Tokens{1};
  const TransferSchedule schedule = make_transfer_schedule(plan, backward_heavy, {.phase = Phase::kPolicyUpdate});
  // Forward: peer (egress 1), arena (1). Backward: both paths would reach 1 + 100: peer; then the arena.
  ASSERT_EQ(schedule.copies.size(), 4U);
  EXPECT_EQ(schedule.copies[0].path, Path::kPeer);
  EXPECT_EQ(schedule.copies[1].path, Path::kHost);
  EXPECT_EQ(schedule.copies[2].path, Path::kPeer);
  EXPECT_EQ(schedule.copies[3].path, Path::kHost);
}

}  // namespace
}  // namespace foremoe
