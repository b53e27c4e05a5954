// Tests schedule guarantees on random plans of every residency, phase and number of micro-steps in flight.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "foremoe/plan/step_plan.h"
#include "foremoe/testing/transfer_schedules.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {
namespace {

using testing::IsEmpty;

const ExpertLayout kLayout = swiglu_layout(8, 4);

// Replays the contents of buffers, with each copy as early or as late as its lease permits. Open leases of a buffer
// never overlap, so a buffer has one writer at a time. Under `free`, copies from peers read the current contents of
// their source's slots, and move from their staging buffer into their slot on arrival.
class Replay {
 public:
  Replay(const StepPlan& plan, const TransferSchedule& schedule, bool early) : plan_(plan), schedule_(schedule) {
    for (int t = 0; t < schedule.num_turns(); ++t) {
      for (const ScheduledCopy& copy : schedule.copies) {
        if ((early ? copy.opens : copy.arrives) != TurnId{t}) continue;
        contents_[{copy.rank, copy.arrives_in()}] = copy.staged() ? read_from(copy) : Content{copy.layer, copy.expert};
      }
      for (const ScheduledCopy& copy : schedule.arriving(TurnId{t})) {
        if (copy.staged()) contents_[{copy.rank, copy.buffer}] = contents_.at({copy.rank, copy.staging});
      }
      if (t < schedule.order.size()) read(TurnId{t});
    }
    if (plan.residency == Residency::kFree) homes_are_home();
  }
  const std::vector<std::string>& wrong() const { return wrong_; }

 private:
  using Content = std::pair<LayerId, ExpertId>;

  Content read_from(const ScheduledCopy& copy) const {
    const auto at = contents_.find({copy.source, copy.source_buffer});
    if (at != contents_.end()) return at->second;
    const std::vector<ExpertId> own = homes(copy.layer, copy.source);
    const int slot = copy.source_buffer - copy.layer.value * plan_.num_slots();
    return {copy.layer, slot < std::ssize(own) ? own[static_cast<std::size_t>(slot)] : kNoExpert};
  }

  // [slot], experts at home on the rank
  std::vector<ExpertId> homes(LayerId layer, RankId rank) const {
    std::vector<ExpertId> result;
    for (int e = 0; e < plan_.num_experts(); ++e) {
      if (plan_.home(layer, e) == rank) result.push_back(ExpertId{e});
    }
    return result;
  }

  void read(TurnId t) {
    const Turn& turn = schedule_.order[t];
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      const std::vector<ExpertId> own = homes(turn.layer, RankId{r});
      const auto num_homes = static_cast<int>(own.size());
      for (int s = 0; s < plan_.num_slots(); ++s) {
        const ExpertId e = plan_.slot_expert(turn.event, turn.layer, r, s);
        if (e == kNoExpert) continue;
        if (plan_.slot_tokens(turn.event, turn.layer, r, s) == Tokens{0} && plan_.residency == Residency::kShared)
          continue;
        int buffer = turn.layer.value * plan_.guest_slots + s - num_homes;
        if (plan_.residency == Residency::kShared)
          buffer = t.value % schedule_.depth * plan_.guest_slots + s - num_homes;
        if (plan_.residency == Residency::kFree) buffer = turn.layer.value * plan_.num_slots() + s;
        const bool pinned = plan_.residency != Residency::kFree && s < num_homes;
        const auto at = pinned ? contents_.end() : contents_.find({RankId{r}, buffer});
        Content content{turn.layer, s < num_homes ? own[s] : kNoExpert};
        if (at != contents_.end()) content = at->second;
        if (content != Content{turn.layer, e}) {
          wrong_.push_back("turn " + std::to_string(t.value) + " rank " + std::to_string(r) + " slot " +
                           std::to_string(s));
        }
      }
    }
  }

  void homes_are_home() {
    for (int l = 0; l < plan_.num_layers(); ++l) {
      for (int r = 0; r < plan_.num_ranks(); ++r) {
        const std::vector<ExpertId> own = homes(LayerId{l}, RankId{r});
        for (std::size_t s = 0; s < own.size(); ++s) {
          const auto at = contents_.find({RankId{r}, l * plan_.num_slots() + static_cast<int>(s)});
          if (at != contents_.end() && at->second != Content{LayerId{l}, own[s]}) wrong_.push_back("home lost");
        }
      }
    }
  }

  const StepPlan& plan_;
  const TransferSchedule& schedule_;
  std::map<std::pair<RankId, int>, Content> contents_;
  std::vector<std::string> wrong_;
};

class EveryPlan : public testing::Test {
 protected:
  void for_each(const std::function<void(const StepPlan&, const TransferSchedule&, const test::ScheduleCase&)>& body) {
    for (const test::ScheduleCase& c : test::random_cases(16)) {
      SCOPED_TRACE(c.name);
      body(c.plan, make_transfer_schedule(c.plan, kLayout, c.options), c);
      if (HasFailure()) return;
    }
  }
};

TEST_F(EveryPlan, HasItsExpertsInPlaceWithTheEarliestAndLatestCopies) {
  for_each([](const StepPlan& plan, const TransferSchedule& schedule, const auto&) {
    EXPECT_THAT(Replay(plan, schedule, true).wrong(), IsEmpty());
    EXPECT_THAT(Replay(plan, schedule, false).wrong(), IsEmpty());
  });
}

TEST_F(EveryPlan, PassesCheckLeases) {
  for_each([](const StepPlan& plan, const TransferSchedule& schedule, const auto&) {
    EXPECT_THAT(check_leases(schedule, plan), IsEmpty());
  });
}

TEST_F(EveryPlan, HasExactlyThePlannedCopies) {
  for_each([](const StepPlan& plan, const TransferSchedule& schedule, const test::ScheduleCase& c) {
    Array<std::int64_t, 2> copies({std::size_t(plan.num_events()), std::size_t(plan.num_layers())});
    for (const ScheduledCopy& copy : schedule.copies) {
      if (copy.arrives.value < schedule.order.size()) ++copies(schedule.order[copy.arrives].event, copy.layer);
    }
    const bool twice =
        plan.residency == Residency::kShared && plan.in_flight == 1 && c.options.phase == Phase::kPolicyUpdate;
    for (int l = 0; l < plan.num_layers(); ++l) {
      CopyFinder finder(plan, LayerId{l});
      for (int t = 0; t < plan.num_events(); ++t) {
        std::int64_t of_plan = 0;
        for (int r = 0; r < plan.num_ranks(); ++r) of_plan += std::ssize(finder.into(EventId{t}, RankId{r}));
        EXPECT_EQ(copies(t, l), twice ? 2 * of_plan : of_plan) << "event " << t << " layer " << l;
      }
    }
  });
}

TEST_F(EveryPlan, HasCopiesSortedByTurnRankAndSlot) {
  for_each([](const StepPlan&, const TransferSchedule& schedule, const auto&) {
    std::size_t seen = 0;
    for (int t = 0; t < schedule.num_turns(); ++t) {
      const auto arriving = schedule.arriving(TurnId{t});
      for (std::size_t i = 0; i < arriving.size(); ++i) {
        EXPECT_EQ(arriving[i].arrives, TurnId{t});
        if (i == 0) continue;
        EXPECT_LE(std::tuple(arriving[i - 1].rank, arriving[i - 1].slot),
                  std::tuple(arriving[i].rank, arriving[i].slot));
      }
      seen += arriving.size();
    }
    EXPECT_EQ(seen, schedule.copies.size());
    EXPECT_GT(schedule.num_turns(), schedule.order.size());
  });
}

TEST_F(EveryPlan, HasArenasWithExactlyTheExpertsOfTheHostPath) {
  for_each([](const StepPlan& plan, const TransferSchedule& schedule, const test::ScheduleCase& c) {
    const Topology topology{.num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node};
    std::vector<std::set<std::pair<int, int>>> fetched(topology.num_nodes());
    for (const ScheduledCopy& copy : schedule.copies) {
      if (plan.residency != Residency::kFree) {
        EXPECT_EQ(copy.source, plan.home(copy.layer, copy.expert));
      }
      if (c.options.path == PathChoice::kHost) {
        EXPECT_EQ(copy.path, Path::kHost);
      }
      if (c.options.path == PathChoice::kPeer) {
        EXPECT_EQ(copy.path, Path::kPeer);
      }
      if (copy.path == Path::kHost)
        fetched[topology.node_of(copy.rank).index()].insert({copy.layer.value, copy.expert.value});
    }
    ASSERT_EQ(schedule.arena.size(), fetched.size());
    for (std::size_t n = 0; n < fetched.size(); ++n) {
      std::vector<std::pair<int, int>> held;
      for (const ArenaExpert& e : schedule.arena[n]) held.emplace_back(e.layer.value, e.expert.value);
      EXPECT_EQ(held, (std::vector<std::pair<int, int>>(fetched[n].begin(), fetched[n].end())));
    }
  });
}

TEST_F(EveryPlan, MakesTheSameScheduleEachTime) {
  for_each([](const StepPlan& plan, const TransferSchedule& schedule, const test::ScheduleCase& c) {
    const StepPlan copy_of_plan = plan;
    const TransferSchedule again = make_transfer_schedule(copy_of_plan, kLayout, c.options);
    EXPECT_EQ(again.copies, schedule.copies);
    EXPECT_EQ(again.first_of_turn, schedule.first_of_turn);
    EXPECT_EQ(again.arena, schedule.arena);
  });
}

}  // namespace
}  // namespace foremoe
