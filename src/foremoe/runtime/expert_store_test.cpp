#include "foremoe/runtime/expert_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

namespace foremoe {
namespace {

constexpr int kHidden = 5;
constexpr int kIntermediate = 3;
constexpr int kElements = 3 * kHidden * kIntermediate;

ExpertStore::Size size_of(int layers, int slots) {
  return {.layers = layers, .slots = slots, .layout = swiglu_layout(kHidden, kIntermediate)};
}

std::vector<float> values(float first) {
  std::vector<float> result(kElements);
  std::iota(result.begin(), result.end(), first);
  return result;
}

// Writes through the pointers that a phase receives: gate_up, then down.
void set_gradient(const ExpertStore& store, int l, int slot, const std::vector<float>& gradient) {
  const HomeExpert& expert = store.homes().experts(l, slot);
  std::memcpy(expert.gradients[0], gradient.data(), 2 * kHidden * kIntermediate * sizeof(float));
  std::memcpy(expert.gradients[1], gradient.data() + 2 * kHidden * kIntermediate,
              kHidden * kIntermediate * sizeof(float));
}

class ExpertStoreIn : public testing::TestWithParam<HomeMemory> {};

INSTANTIATE_TEST_SUITE_P(Memory, ExpertStoreIn, testing::Values(HomeMemory::kShared, HomeMemory::kPrivate));

TEST_P(ExpertStoreIn, EachSlotKeepsItsOwnWeightsAndGradients) {
  ExpertStore store(size_of(2, 3), GetParam());
  for (int l = 0; l < 2; ++l) {
    for (int s = 0; s < 3; ++s) {
      store.set_weights(LayerId{l}, s, values(static_cast<float>(1000 * l + 100 * s)));
      set_gradient(store, l, s, values(static_cast<float>(-1000 * l - 100 * s)));
    }
  }
  for (int l = 0; l < 2; ++l) {
    for (int s = 0; s < 3; ++s) {
      EXPECT_EQ(store.weights(LayerId{l}, s), values(static_cast<float>(1000 * l + 100 * s)));
      EXPECT_EQ(store.gradient(LayerId{l}, s), values(static_cast<float>(-1000 * l - 100 * s)));
    }
  }
}

TEST_P(ExpertStoreIn, LentPointersReferToTheWeights) {
  ExpertStore store(size_of(1, 2), GetParam());
  store.set_weights(LayerId{0}, 1, values(7));
  const HomeExpert& expert = store.homes().experts(0, 1);
  float down = 0;
  std::memcpy(&down, expert.weights[1], sizeof(float));
  EXPECT_EQ(down, 7.0F + 2 * kHidden * kIntermediate);
  for (const std::byte* segment : expert.weights) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segment) % 64, 0U);
    const std::span<const std::byte> region = store.homes().regions.at(0).bytes;
    EXPECT_GE(segment, region.data());
    EXPECT_LT(segment, region.data() + region.size());
  }
}

TEST_P(ExpertStoreIn, ZeroesTheGradientsOfOneLayer) {
  ExpertStore store(size_of(3, 2), GetParam());
  for (int l = 0; l < 3; ++l) set_gradient(store, l, 1, values(1));
  store.zero_gradients(LayerId{1});
  EXPECT_EQ(store.gradient(LayerId{0}, 1), values(1));
  EXPECT_EQ(store.gradient(LayerId{1}, 1), std::vector<float>(kElements));
  EXPECT_EQ(store.gradient(LayerId{2}, 1), values(1));
  store.zero_gradients();
  EXPECT_EQ(store.gradient(LayerId{2}, 1), std::vector<float>(kElements));
}

TEST_P(ExpertStoreIn, SgdStepsEveryExpert) {
  ExpertStore store(size_of(2, 2), GetParam());
  store.set_weights(LayerId{1}, 1, values(3));
  set_gradient(store, 1, 1, values(8));
  store.sgd(0.5F);
  const std::vector<float> weights = store.weights(LayerId{1}, 1);
  for (int i = 0; i < kElements; ++i) {
    EXPECT_EQ(weights[static_cast<std::size_t>(i)],
              3.0F + static_cast<float>(i) - 0.5F * (8.0F + static_cast<float>(i)));
  }
}

TEST_P(ExpertStoreIn, AdamKeepsMomentsFromStepToStep) {
  ExpertStore store(size_of(1, 2), GetParam());
  double weight = 0, mean = 0, square = 0;
  for (int step = 1; step <= 5; ++step) {
    const double gradient = step % 2 == 0 ? -0.25 : 1.5;
    set_gradient(store, 0, 1, std::vector<float>(kElements, static_cast<float>(gradient)));
    store.adam({.rate = 0.1F, .step = step});
    mean = 0.9 * mean + 0.1 * gradient;
    square = 0.999 * square + 0.001 * gradient * gradient;
    weight -= 0.1 * (mean / (1 - std::pow(0.9, step))) / (std::sqrt(square / (1 - std::pow(0.999, step))) + 1e-8);
    for (const float w : store.weights(LayerId{0}, 1)) EXPECT_NEAR(w, weight, 1e-5);
    for (const float w : store.weights(LayerId{0}, 0)) EXPECT_EQ(w, 0.0F);
  }
}

TEST_P(ExpertStoreIn, StateContainsWeightsAndAfterAdamMoments) {
  ExpertStore store(size_of(1, 2), GetParam());
  EXPECT_EQ(store.state_bytes(), Bytes{kElements * 4});
  store.set_weights(LayerId{0}, 0, values(1));
  set_gradient(store, 0, 0, values(1));
  store.adam({.step = 1});
  EXPECT_EQ(store.state_bytes(), Bytes{3 * kElements * 4});

  std::vector<std::byte> state(3 * kElements * 4);
  store.save_state(LayerId{0}, 0, state);
  store.load_state(LayerId{0}, 1, state);
  for (const int slot : {0, 1}) set_gradient(store, 0, slot, values(-2));
  store.adam({.step = 2});
  EXPECT_EQ(store.weights(LayerId{0}, 0), store.weights(LayerId{0}, 1));
}

TEST(ExpertStore, SharedWeightsCanBeOpenedByName) {
  ExpertStore store(size_of(1, 1), HomeMemory::kShared);
  store.set_weights(LayerId{0}, 0, values(9));
  const SharedRegion& region = store.homes().regions.at(0);
  const SharedMemory seen = SharedMemory::open(region.name);
  ASSERT_EQ(seen.bytes().size(), region.bytes.size());
  float first = 0;
  std::memcpy(&first, seen.bytes().data(), sizeof(float));
  EXPECT_EQ(first, 9.0F);
}

TEST(ExpertStore, PrivateWeightsHaveNoName) {
  EXPECT_EQ(ExpertStore(size_of(1, 1), HomeMemory::kPrivate).homes().regions.at(0).name, "");
}

}  // namespace
}  // namespace foremoe
