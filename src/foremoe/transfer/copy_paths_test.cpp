#include "foremoe/transfer/copy_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "foremoe/cluster/cluster.h"
#include "foremoe/core/random.h"
#include "foremoe/testing/transfer_schedules.h"

namespace foremoe {
namespace {

using testing::IsEmpty;

const ExpertLayout kLayout = swiglu_layout(8, 4);

// A guest of a rank at an event of the only layer.
struct Guest {
  int event, rank, expert;
};

// A plan with one home expert and one guest slot per rank. Expert e is at home on rank e.
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

TEST(CopyPaths, AnExpertFetchedOnceByItsNodeComesFromAPeer) {
  // Expert 0 is fetched twice, but by two nodes.
  const TransferSchedule schedule = make_transfer_schedule(plan_with({{0, 2, 0}, {0, 4, 0}}, 6, 2), kLayout, {});
  EXPECT_EQ(number_by_path(schedule), (std::map<Path, int>{{Path::kPeer, 2}}));
  EXPECT_THAT(schedule.arena, testing::Each(IsEmpty()));
}

TEST(CopyPaths, TheArenaRelievesARankWhoseExpertAllRanksFetch) {
  std::vector<Guest> guests;
  for (int r = 1; r < 8; ++r) guests.push_back({0, r, 0});
  const TransferSchedule schedule = make_transfer_schedule(plan_with(guests, 8, 8), kLayout, {});
  // Alternates between the egress of rank 0 and the arena; ties go to the peer.
  EXPECT_EQ(number_by_path(schedule), (std::map<Path, int>{{Path::kPeer, 4}, {Path::kHost, 3}}));
  EXPECT_EQ(schedule.arena[0], (std::vector<ArenaExpert>{{LayerId{0}, ExpertId{0}}}));
}

TEST(CopyPaths, TheArenaRelievesABusyNetworkCard) {
  // All ranks of node 1 fetch an expert of rank 0. Its card sends four copies, or two copies and one arena entry.
  std::vector<Guest> guests;
  for (int r = 4; r < 8; ++r) guests.push_back({0, r, 0});
  const TransferSchedule schedule = make_transfer_schedule(plan_with(guests, 8, 4), kLayout, {});
  EXPECT_EQ(number_by_path(schedule), (std::map<Path, int>{{Path::kPeer, 2}, {Path::kHost, 2}}));
}

TEST(CopyPaths, AFastPeerLinkServesAllCopies) {
  std::vector<Guest> guests;
  for (int r = 1; r < 8; ++r) guests.push_back({0, r, 0});
  const StepPlan plan = plan_with(guests, 8, 8);
  const auto number_to_hosts = [&](double peers) {
    Cluster cluster = find_cluster("h100");
    cluster.peers.bytes_per_second = peers;
    const ExpertLayout layout = swiglu_layout(2048, 768);
    return std::ranges::count(make_transfer_schedule(plan, layout, {.cluster = &cluster}).copies, Path::kHost,
                              &ScheduledCopy::path);
  };
  EXPECT_EQ(number_to_hosts(370e9), 0);  // real speed: seven copies are faster than filling the arena with one expert
  EXPECT_GE(number_to_hosts(10e9), 4);   // slower than the host path
}

// Seconds to fill arenas plus seconds of the busiest link: two ranks per switch, four per node.
double seconds_of_paths(const StepPlan& plan, const std::vector<ScheduledCopy>& copies, const Cluster& c) {
  const auto bytes = static_cast<double>(kLayout.bytes().value);
  using Links = std::map<std::pair<std::string, int>, double>;
  Links links;
  Links arena;
  std::set<std::tuple<int, int, int>> written;
  const auto send_far = [&](Links& to, int rank) {
    to[{"network out", rank}] += bytes / c.network.bytes_per_second;
    to[{"host out", rank}] += bytes / c.host.bytes_per_second;
  };
  for (const ScheduledCopy& copy : copies) {
    const int to = copy.rank.value;
    const int from = copy.source.value;
    if (copy.path == Path::kHost) {
      links[{"host in", to}] += bytes / c.host.bytes_per_second;
      links[{"switch in", to / 2}] += bytes / c.switch_bytes_per_second;
      links[{"memory", to / 4}] += bytes / c.host_memory_bytes_per_second;
      if (!written.emplace(to / 4, copy.layer.value, copy.expert.value).second) continue;
      arena[{"memory", to / 4}] += bytes / c.host_memory_bytes_per_second;
      if (from / 4 == to / 4) {
        arena[{"host out", from}] += bytes / c.host.bytes_per_second;
        arena[{"switch out", from / 2}] += bytes / c.switch_bytes_per_second;
        continue;
      }
      send_far(arena, from);
      for (int r = to / 4 * 4; r < to / 4 * 4 + 4; ++r) {
        arena[{"network in", r}] += bytes / 4 / c.network.bytes_per_second;
        arena[{"switch out", r / 2}] += bytes / 4 / c.switch_bytes_per_second;
      }
    } else if (from / 4 == to / 4) {
      links[{"peers in", to}] += bytes / c.peers.bytes_per_second;
      links[{"peers out", from}] += bytes / c.peers.bytes_per_second;
    } else {
      links[{"network in", to}] += bytes / c.network.bytes_per_second;
      links[{"host in", to}] += bytes / c.host.bytes_per_second;
      send_far(links, from);
    }
  }
  EXPECT_EQ(plan.ranks_per_node, 4);
  const auto most = [](const Links& of) {
    double seconds = 0;
    for (const auto& [link, taken] : of) seconds = std::max(seconds, taken);
    return seconds;
  };
  return most(arena) + most(links);
}

TEST(CopyPaths, ArenasAndBusiestLinkTakeNoLongerThanWithPeersAlone) {
  int less = 0;
  Random random(5);
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const LoadTable load =
        test::random_load({.micro_steps = 6, .layers = 3, .ranks = 8, .experts = 16, .ranks_per_node = 4}, seed);
    const StepPlan plan = test::random_plan(load, {.guest_slots = 3}, seed);
    Cluster cluster = find_cluster("h100");
    cluster.ranks_per_switch = 2;
    for (double* rate :
         {&cluster.peers.bytes_per_second, &cluster.network.bytes_per_second, &cluster.host.bytes_per_second,
          &cluster.switch_bytes_per_second, &cluster.host_memory_bytes_per_second}) {
      *rate = 1e6 * static_cast<double>(1 + random.below(40));
    }
    for (LinkSpeed* link : {&cluster.peers, &cluster.network, &cluster.host}) link->latency_seconds = 0;
    const auto seconds = [&](PathChoice choice) {
      const ScheduleOptions options{.path = choice, .cluster = &cluster};
      return seconds_of_paths(plan, make_transfer_schedule(plan, kLayout, options).copies, cluster);
    };
    const double both = seconds(PathChoice::kAuto);
    const double peers = seconds(PathChoice::kPeer);
    EXPECT_LE(both, peers * (1 + 1e-9)) << "seed " << seed;
    less += both < peers ? 1 : 0;
  }
  EXPECT_GT(less, 5) << "the cases show nothing";
}

TEST(CopyPaths, AnArenaContainsOnlyExpertsFetchedAtLeastTwice) {
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

TEST(CopyPaths, BytesDependOnThePassThatReads) {
  // Seven ranks fetch expert 0 in both passes of a micro-step. Forward copies are small and not worth an arena entry,
  // which contains all segments. Backward copies alternate between both paths.
  const ExpertLayout backward_heavy(
      {{.name = "f", .elements = 16, .in_backward = false}, {.name = "b", .elements = 1600, .in_forward = false}});
  std::vector<Guest> guests;
  for (int r = 1; r < 8; ++r) guests.push_back({0, r, 0});
  StepPlan plan = plan_with(guests, 8, 8);
  plan.residency = Residency::kShared;
  for (int r = 1; r < 8; ++r) plan.slot_tokens(0, 0, r, 1) = Tokens{1};
  const TransferSchedule schedule = make_transfer_schedule(plan, backward_heavy, {.phase = Phase::kPolicyUpdate});
  std::map<std::pair<Pass, Path>, int> number;
  for (const ScheduledCopy& copy : schedule.copies) ++number[{schedule.order[copy.arrives].pass, copy.path}];
  EXPECT_EQ((number[{Pass::kForward, Path::kPeer}]), 7);
  EXPECT_EQ((number[{Pass::kBackward, Path::kPeer}]), 4);
  EXPECT_EQ((number[{Pass::kBackward, Path::kHost}]), 3);
}

}  // namespace
}  // namespace foremoe
