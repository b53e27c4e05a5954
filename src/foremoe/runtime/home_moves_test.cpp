#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"
#include "foremoe/runtime/expert_store.h"
#include "foremoe/runtime/threads/threads_communicator.h"

namespace foremoe {
namespace {

constexpr int kLayers = 2;
constexpr int kExperts = 12;
constexpr int kRanks = 4;
constexpr int kHidden = 3;
constexpr int kIntermediate = 2;
constexpr int kElements = 3 * kHidden * kIntermediate;

using Home = Array<RankId, 2>;

Home contiguous() {
  Home home({kLayers, kExperts});
  for (int l = 0; l < kLayers; ++l) {
    for (int e = 0; e < kExperts; ++e) home(l, e) = RankId{e / (kExperts / kRanks)};
  }
  return home;
}

Home shuffled(std::uint64_t seed) {
  Random random(seed);
  Home home = contiguous();
  for (int l = 0; l < kLayers; ++l) {
    for (std::size_t e = kExperts; e > 1; --e) std::swap(home(l, e - 1), home(l, random.below(e)));
  }
  return home;
}

TEST(HomeSlots, AreAscendingOnEveryRank) {
  const Home home = shuffled(3);
  std::vector<int> seen(kExperts);
  for (int r = 0; r < kRanks; ++r) {
    const Array<ExpertId, 2> slots = homes_on(home, kRanks, RankId{r});
    EXPECT_EQ(slots.extent(1), std::size_t{kExperts / kRanks});
    EXPECT_TRUE(std::ranges::is_sorted(slots.row(1)));
    for (const ExpertId e : slots.row(1)) {
      EXPECT_EQ(home(1, e), RankId{r});
      ++seen[e.index()];
    }
  }
  EXPECT_THAT(seen, testing::Each(1));
}

std::string refusal(const Home& home, int num_ranks) {
  try {
    homes_on(home, num_ranks, RankId{0});
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(HomeSlots, RejectsUnevenHomesAndInvalidRanks) {
  Home home = contiguous();
  EXPECT_THAT(refusal(home, 5), testing::HasSubstr("12 experts cannot be spread equally over 5 ranks"));
  home(1, 4) = RankId{0};
  EXPECT_THAT(refusal(home, kRanks), testing::HasSubstr("home[1, 4]: rank 0 would be home to more than 3 experts"));
  home(1, 4) = RankId{4};
  EXPECT_THAT(refusal(home, kRanks), testing::HasSubstr("home[1, 4]: 4 is not one of 4 ranks"));
}

// Runs one step per placement of homes, with gradients that depend only on (step, layer, expert).
class Training {
 public:
  explicit Training(bool adam) : adam_(adam) {}

  std::map<std::pair<int, int>, std::vector<float>> weights;  // by (layer, expert), after the last step
  std::int64_t bytes = 0;                                     // bytes sent by all ranks

  void run(const std::vector<Home>& home_of_step) {
    const auto communicators =
        make_threads_communicators({.num_ranks = kRanks, .ranks_per_node = 2}, std::chrono::milliseconds(20'000));
    run_ranks(kRanks, [&](RankId rank) {
      try {
        train(home_of_step, *communicators[rank.index()]);
      } catch (const std::exception& error) {
        communicators[rank.index()]->give_up(error.what());
        throw;
      }
    });
  }

 private:
  void train(const std::vector<Home>& home_of_step, Communicator& communicator) {
    ExpertStore store({.layers = kLayers, .slots = kExperts / kRanks, .layout = swiglu_layout(kHidden, kIntermediate)},
                      HomeMemory::kPrivate);
    Home home = home_of_step.front();
    for_each_home(home, communicator.rank(),
                  [&](int l, int s, ExpertId e) { store.set_weights(LayerId{l}, s, drawn(99, l, e)); });
    Bytes sent;
    for (std::size_t step = 0; step < home_of_step.size(); ++step) {
      sent += move_homes({.from = home, .to = home_of_step[step]}, store, communicator);
      home = home_of_step[step];
      for_each_home(home, communicator.rank(), [&](int l, int s, ExpertId e) {
        const std::vector<float> gradient = drawn(step, l, e);
        const HomeExpert& expert = store.homes().experts(l, s);
        std::memcpy(expert.gradients[0], gradient.data(), kElements * 2 / 3 * sizeof(float));
        std::memcpy(expert.gradients[1], gradient.data() + kElements * 2 / 3, kElements / 3 * sizeof(float));
      });
      adam_ ? store.adam({.rate = 0.1F, .step = static_cast<int>(step) + 1}) : store.sgd(0.1F);
    }
    const std::lock_guard lock(mutex_);
    for_each_home(home, communicator.rank(), [&](int l, int s, ExpertId e) {
      weights[{l, e.value}] = store.weights(LayerId{l}, s);
    });
    bytes += sent.value;
  }

  template <class F>
  static void for_each_home(const Home& home, RankId rank, F f) {
    const Array<ExpertId, 2> slots = homes_on(home, kRanks, rank);
    for (int l = 0; l < kLayers; ++l) {
      for (int s = 0; s < kExperts / kRanks; ++s) f(l, s, slots(l, s));
    }
  }

  static std::vector<float> drawn(std::size_t step, int l, ExpertId e) {
    Random random(step * 1000 + static_cast<std::size_t>(l) * 100 + e.index());
    std::vector<float> values(kElements);
    for (float& v : values) v = static_cast<float>(random.normal());
    return values;
  }

  const bool adam_;
  std::mutex mutex_;
};

TEST(HomeMovesThread, AMovedExpertTrainsIdentically) {
  for (const bool adam : {false, true}) {
    Training moved(adam);
    moved.run({contiguous(), shuffled(1), shuffled(2), shuffled(2), shuffled(3), contiguous()});
    Training stayed(adam);
    stayed.run(std::vector<Home>(6, contiguous()));
    EXPECT_EQ(moved.weights.size(), std::size_t{kLayers * kExperts});
    EXPECT_EQ(moved.weights, stayed.weights) << (adam ? "Adam" : "SGD");
    EXPECT_EQ(stayed.bytes, 0);
  }
}

TEST(HomeMovesThread, SendsOnlyExpertsWhoseHomeChanges) {
  Home swapped = contiguous();
  std::swap(swapped(1, 0), swapped(1, 11));
  Training sgd(false);
  sgd.run({contiguous(), swapped});
  EXPECT_EQ(sgd.bytes, 2 * kElements * 4);
  Training adam(true);
  adam.run({contiguous(), swapped});
  EXPECT_EQ(adam.bytes, 3 * 2 * kElements * 4);  // weights and both moments
}

}  // namespace
}  // namespace foremoe
