#include "foremoe/runtime/gradient_returns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "foremoe/core/random.h"

namespace foremoe {
namespace {

// Random guests that stay, leave or come at each event, some without quota. 3 ranks, 2 homes and 2 guest slots each.
StepPlan random_plan(std::uint64_t seed, Residency residency) {
  constexpr int kEvents = 12, kLayers = 2, kRanks = 3, kHomes = 2, kGuests = 2, kExperts = 6;
  Random random(seed);
  StepPlan plan{.residency = residency, .guest_slots = kGuests};
  plan.slot_expert = Array<ExpertId, 4>({kEvents, kLayers, kRanks, kHomes + kGuests}, kNoExpert);
  plan.slot_tokens = Array<Tokens, 4>(plan.slot_expert.shape());
  plan.home = Array<RankId, 2>({kLayers, kExperts});
  for (int l = 0; l < kLayers; ++l) {
    for (int e = 0; e < kExperts; ++e) plan.home(l, e) = RankId{e / kHomes};
    for (int r = 0; r < kRanks; ++r) {
      for (int event = 0; event < kEvents; ++event) {
        plan.slot_expert(event, l, r, 0) = ExpertId{r * kHomes};
        plan.slot_expert(event, l, r, 1) = ExpertId{r * kHomes + 1};
        for (int g = 0; g < kGuests; ++g) {
          ExpertId& guest = plan.slot_expert(event, l, r, kHomes + g);
          const bool stays = event > 0 && random.below(2) == 0;
          // The two slots draw from different experts, so that none is twice on a rank.
          const int other = (r + 1 + g) % kRanks;
          guest = stays ? plan.slot_expert(event - 1, l, r, kHomes + g)
                        : ExpertId{other * kHomes + static_cast<int>(random.below(kHomes))};
          plan.slot_tokens(event, l, r, kHomes + g) = Tokens{static_cast<int>(random.below(3))};
        }
      }
    }
  }
  for (int event = 0; event < kEvents; ++event) {
    plan.event_micro_step.emplace_back(event);
    plan.event_pass.push_back(Pass::kForward);
  }
  return plan;
}

// What every guest slot would hold in sum, kept by hand: each backward adds one to every guest with quota.
class Ledger {
 public:
  explicit Ledger(const StepPlan& plan) : plan_(plan) {}

  void ran_backward(int event, int layer) {
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      for (int s = 2; s < plan_.num_slots(); ++s) {
        if (plan_.slot_tokens(event, layer, r, s) == Tokens{0}) continue;
        const int expert = plan_.slot_expert(event, layer, r, s).value;
        auto& [holder, sum] = slots_[{layer, r, s}];
        EXPECT_TRUE(sum == 0 || holder == expert) << "a slot mixes gradients of two experts";
        holder = expert;
        ++sum;
        ++added[{layer, expert}];
      }
    }
  }
  void send_home(int layer, const std::vector<GuestGradients::Guest>& guests) {
    EXPECT_TRUE(std::ranges::is_sorted(guests)) << "by expert, then rank";
    for (const GuestGradients::Guest& guest : guests) {
      auto& [holder, sum] = slots_[{layer, guest.rank.value, guest.slot.value}];
      EXPECT_EQ(holder, guest.expert.value);
      EXPECT_GT(sum, 0);
      home[{layer, guest.expert.value}] += sum;
      sum = 0;
    }
  }
  std::map<std::pair<int, int>, int> added, home;  // (layer, expert)

 private:
  const StepPlan& plan_;
  std::map<std::tuple<int, int, int>, std::pair<int, int>> slots_;  // (layer, rank, slot) → (expert, sum)
};

TEST(GuestGradients, GoHomeExactlyOnceAndNeverMixWhateverComesAndGoes) {
  for (const Residency residency : {Residency::kResident, Residency::kShared, Residency::kStatic}) {
    for (int seed = 0; seed < 50; ++seed) {
      const StepPlan plan = random_plan(seed, residency);
      Random random(seed);
      GuestGradients gradients(plan);
      Ledger ledger(plan);
      for (int event = 0; event < plan.num_events(); ++event) {
        for (int l = plan.num_layers() - 1; l >= 0; --l) {
          if (random.below(4) != 0) {  // else the micro-step fell back to homes
            ledger.ran_backward(event, l);
            gradients.ran_backward(EventId{event}, LayerId{l});
          }
          ledger.send_home(l, gradients.take_leaving(EventId{event}, LayerId{l}));
        }
      }
      for (int l = 0; l < plan.num_layers(); ++l) ledger.send_home(l, gradients.take_all(LayerId{l}));
      EXPECT_EQ(ledger.home, ledger.added) << "seed " << seed;
      EXPECT_FALSE(ledger.added.empty());
    }
  }
}

TEST(GuestGradients, StayWhileTheirGuestDoes) {
  StepPlan plan = random_plan(1, Residency::kResident);
  for (int event = 0; event < plan.num_events(); ++event) {
    for (int r = 0; r < 3; ++r) {
      for (int s = 2; s < 4; ++s) {
        plan.slot_expert(event, 0, r, s) = plan.slot_expert(0, 0, r, s);
        plan.slot_tokens(event, 0, r, s) = Tokens{1};
      }
    }
  }
  GuestGradients gradients(plan);
  for (int event = 0; event < plan.num_events(); ++event) {
    gradients.ran_backward(EventId{event}, LayerId{0});
    EXPECT_TRUE(gradients.take_leaving(EventId{event}, LayerId{0}).empty());
    EXPECT_TRUE(gradients.dirty(LayerId{0}, RankId{1}, SlotId{2}));
  }
  EXPECT_EQ(gradients.take_all(LayerId{0}).size(), 6U);
  EXPECT_FALSE(gradients.dirty(LayerId{0}, RankId{1}, SlotId{2}));
  EXPECT_TRUE(gradients.take_all(LayerId{0}).empty()) << "exactly once";
}

}  // namespace
}  // namespace foremoe
