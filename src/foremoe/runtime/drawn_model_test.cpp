#include "foremoe/runtime/drawn_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace foremoe {
namespace {

constexpr ModelSize kSize{
    .layers = 2, .experts = 4, .top_k = 2, .shape = {.hidden = 16, .intermediate = 64}, .seed = 5};
constexpr Tensor kAll[] = {Tensor::kGateUp, Tensor::kDown, Tensor::kRouter, Tensor::kInput, Tensor::kTarget};

std::vector<float> drawn(const TensorKey& key, std::size_t n, std::uint64_t seed = kSize.seed) {
  ModelSize size = kSize;
  size.seed = seed;
  std::vector<float> values(n);
  draw(size, key, values);
  return values;
}

TEST(Draw, EqualKeysProduceEqualBits) {
  for (const Tensor tensor : kAll) EXPECT_EQ(drawn({tensor, 1, 2}, 99), drawn({tensor, 1, 2}, 99));
}

TEST(Draw, DifferentKeysAndSeedsProduceDifferentValues) {
  std::set<std::vector<float>> seen;
  int keys = 0;
  for (const Tensor tensor : kAll) {
    for (int a = 0; a < 20; ++a) {
      for (int b = 0; b < 20; ++b) {
        for (const std::uint64_t seed : {0, 1, 2}) {
          seen.insert(drawn({tensor, a, b}, 2, seed));
          ++keys;
        }
      }
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), keys);
}

TEST(Draw, HasTheDocumentedMeanAndVariance) {
  const double variance[] = {1.0 / 16, 1.0 / 64, 1.0 / 16, 1, 1};
  for (const Tensor tensor : kAll) {
    constexpr std::size_t kValues = 100'000;
    double sum = 0, squares = 0, greatest = 0;
    for (const float v : drawn({tensor, 0, 0}, kValues)) {
      sum += v;
      squares += double{v} * v;
      greatest = std::max(greatest, std::abs(double{v}));
    }
    const double expected = variance[static_cast<int>(tensor)];
    EXPECT_NEAR(sum / kValues / std::sqrt(expected), 0, 0.02);
    EXPECT_NEAR(squares / kValues / expected, 1, 0.02);
    const bool is_uniform = greatest <= std::sqrt(3 * expected) * (1 + 1e-6);
    EXPECT_EQ(is_uniform, tensor != Tensor::kInput && tensor != Tensor::kTarget);
  }
}

TEST(Draw, AShorterTensorIsAPrefixOfALongerOne) {
  for (const Tensor tensor : kAll) {
    std::vector<float> longer = drawn({tensor, 0, 0}, 8);
    longer.resize(7);
    EXPECT_EQ(drawn({tensor, 0, 0}, 7), longer);
  }
}

}  // namespace
}  // namespace foremoe
