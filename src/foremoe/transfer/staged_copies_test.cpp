// Ranks on separate threads exchange experts. No other copy of these experts' weights exists.

#include "foremoe/transfer/staged_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "foremoe/core/error.h"
#include "foremoe/testing/transfer_cluster.h"
#include "foremoe/testing/transfer_schedules.h"

namespace foremoe::test {
namespace {

using testing::HasSubstr;

// Only backward passes read the second segment, so only a complete copy can be the source of another.
ExpertLayout layout_with_a_backward() {
  return ExpertLayout({{.name = "both", .elements = 37}, {.name = "backward", .elements = 16, .in_forward = false}});
}

class Exchange {
 public:
  Exchange(StepPlan plan, int depth)
      : plan_(std::move(plan)),
        shape_{.ranks = plan_.num_ranks(),
               .ranks_per_node = plan_.ranks_per_node,
               .micro_steps = plan_.num_micro_steps(),
               .layers = plan_.num_layers(),
               .experts = plan_.num_experts(),
               .guests = plan_.guest_slots},
        cluster_(shape_, make_transfer_schedule(plan_, layout_, {.path = PathChoice::kPeer, .depth = depth}), layout_) {
    for (int r = 0; r < shape_.ranks; ++r) {
      for_each_home(RankId{r}, [&](int buffer, LayerId l, ExpertId e) {
        for (std::size_t s = 0; s < layout_.num_segments(); ++s) {
          std::memcpy(cluster_.buffer(RankId{r}, buffer)[s], cluster_.home(l, e)[s], bytes(s));
        }
      });
    }
  }

  // Number of slots without the plan's expert, and of homes not restored at the end.
  int wrong(const std::function<std::unique_ptr<CopyLink>(RankId)>& link_of) {
    std::atomic<int> wrong = 0;
    const auto run = [&](RankId rank) {
      ClusterRank::Links links;
      links.peer = link_of(rank);
      ClusterRank of_rank(cluster_, rank, std::move(links), {.must_arrive = true});
      for (int t = 0; t < cluster_.schedule().order.size(); ++t) {
        of_rank.engine().submit(TurnId{t});
        if (!of_rank.engine().wait(TurnId{t})) ++wrong;
        const Turn& turn = cluster_.schedule().order[TurnId{t}];
        for (int s = 0; s < plan_.num_slots(); ++s) {
          const ExpertId e = plan_.slot_expert(turn.event, turn.layer, rank, s);
          const int buffer = turn.layer.value * plan_.num_slots() + s;
          if (e != kNoExpert && !holds(rank, buffer, turn.layer, e)) ++wrong;
        }
        of_rank.engine().release(TurnId{t});
      }
      of_rank.engine().finish();
      for_each_home(rank, [&](int buffer, LayerId l, ExpertId e) { wrong += holds(rank, buffer, l, e) ? 0 : 1; });
    };
    std::vector<std::jthread> ranks;
    for (int r = 0; r < shape_.ranks; ++r) ranks.emplace_back(run, RankId{r});
    ranks.clear();
    return wrong;
  }

  const TransferSchedule& schedule() const { return cluster_.schedule(); }

 private:
  std::size_t bytes(std::size_t s) const { return static_cast<std::size_t>(layout_.segments()[s].bytes().value); }

  void for_each_home(RankId rank, const std::function<void(int, LayerId, ExpertId)>& f) const {
    for (int l = 0; l < shape_.layers; ++l) {
      int slot = 0;
      for (int e = 0; e < shape_.experts; ++e) {
        if (plan_.home(l, e) == rank) f(l * plan_.num_slots() + slot++, LayerId{l}, ExpertId{e});
      }
    }
  }

  bool holds(RankId rank, int buffer, LayerId l, ExpertId e) const {
    for (std::size_t s = 0; s < layout_.num_segments(); ++s) {
      if (std::memcmp(cluster_.buffer(rank, buffer)[s], cluster_.home(l, e)[s], bytes(s)) != 0) return false;
    }
    return true;
  }

  ExpertLayout layout_ = layout_with_a_backward();
  StepPlan plan_;
  ClusterShape shape_;
  Cluster cluster_;
};

// Starts each copy only after some of the owner's later calls.
class LateLink final : public CopyLink {
 public:
  explicit LateLink(std::uint64_t seed) : random_(seed) {}
  void submit(const CopyRequest& request) override {
    waiting_[request.id] = {request, static_cast<int>(random_.bits() % 4)};
  }
  CopyState poll(CopyId id) override {
    auto& [request, polls] = waiting_.at(id);
    if (polls-- > 0) return CopyState::kUnderWay;
    MemcpyLink().submit(request);
    waiting_.erase(id);
    return CopyState::kDone;
  }
  void cancel(CopyId id) override { waiting_.erase(id); }
  void progress() override {}

 private:
  Random random_;
  std::map<CopyId, std::pair<CopyRequest, int>> waiting_;
};

TEST(StagedCopiesThread, PutEveryExpertIntoItsSlotAndRestoreHomes) {
  std::size_t copies = 0;
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    const int depth = 1 + static_cast<int>(seed % 3);
    const LoadTable load = random_load(
        {.micro_steps = 4, .layers = 3, .ranks = 4, .experts = 8, .ranks_per_node = 1 + static_cast<int>(seed % 4)},
        seed);
    Exchange exchange(random_plan_with_gaps(load, {.residency = Residency::kFree, .guest_slots = 2}, seed), depth);
    EXPECT_EQ(exchange.wrong([&](RankId r) { return std::make_unique<LateLink>(seed * 10 + r.index()); }), 0)
        << "seed " << seed;
    copies += exchange.schedule().copies.size();
  }
  EXPECT_GT(copies, 500U) << "the plans show nothing";
}

TEST(StagedCopies, StartFromThePlacementOfAPreviousPhase) {
  // Experts 0 and 2 are exchanged at the last event but not at the first, which therefore copies both back.
  const StepPlan plan = free_plan({{0, 1, 2, 3}, {2, 1, 0, 3}});
  ScheduleOptions options{.phase = Phase::kPolicyUpdate, .path = PathChoice::kPeer, .leaves_last_placement = true};
  const auto copies_of = [&] {
    return make_transfer_schedule(plan, turns_of(plan, options.phase), layout_with_a_backward(), options).copies;
  };
  EXPECT_EQ(copies_of().size(), 2U);
  options.begins_with_last_placement = true;
  const std::vector<ScheduledCopy> copies = copies_of();
  ASSERT_EQ(copies.size(), 4U);
  for (const ScheduledCopy& copy : copies) {
    EXPECT_EQ(copy.source, RankId{1 - copy.rank.value});
    EXPECT_EQ(copy.closes, TurnId{copy.arrives.value + 1}) << "until its backward";
  }
  EXPECT_EQ(copies[0].arrives, TurnId{0});
  EXPECT_EQ(copies[2].arrives, TurnId{2});
}

TEST(StagedCopies, RejectAnExpertWithoutSourceWithItsIndex) {
  StepPlan plan = free_plan({{1, 1, 2, 3}, {1, 1, 2, 3}, {0, 1, 2, 3}});  // expert 0 leaves and returns
  plan.slot_expert(0, 0, 0, 0) = plan.slot_expert(1, 0, 0, 0) = ExpertId{3};
  try {
    make_transfer_schedule(plan, layout_with_a_backward(), {.path = PathChoice::kPeer});
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("slot_expert[2, 0, 0, 0]: no rank holds expert 0 before this copy"));
  }
}

}  // namespace
}  // namespace foremoe::test
