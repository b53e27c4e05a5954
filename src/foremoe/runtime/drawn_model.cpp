#include "foremoe/runtime/drawn_model.h"

#include <cmath>
#include <numbers>

#include "foremoe/core/random.h"

namespace foremoe {

namespace {

// Finaliser of SplitMix64 (Steele, Lea, Flood 2014): similar keys produce unrelated seeds.
std::uint64_t mix(std::uint64_t seed, std::uint64_t value) {
  std::uint64_t z = seed ^ (value + 0x9e3779b97f4a7c15U + (seed << 6) + (seed >> 2));
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

void draw_uniform(Random& random, double variance, std::span<float> values) {
  const double bound = std::sqrt(3 * variance);
  for (float& v : values) v = static_cast<float>(bound * (2 * random.uniform() - 1));
}

// Box–Muller transform; uses both values of each pair.
void draw_normal(Random& random, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); i += 2) {
    const double radius = std::sqrt(-2 * std::log(1 - random.uniform()));
    const double angle = 2 * std::numbers::pi * random.uniform();
    values[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < values.size()) values[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
}

}  // namespace

void draw(const ModelSize& size, const TensorKey& key, std::span<float> values) {
  std::uint64_t seed = mix(0, size.seed);
  for (const int part : {static_cast<int>(key.tensor), key.a, key.b})
    seed = mix(seed, static_cast<std::uint64_t>(part));
  Random random(seed);
  switch (key.tensor) {
    case Tensor::kGateUp:
    case Tensor::kRouter:
      return draw_uniform(random, 1.0 / size.shape.hidden, values);
    case Tensor::kDown:
      return draw_uniform(random, 1.0 / size.shape.intermediate, values);
    case Tensor::kInput:
    case Tensor::kTarget:
      return draw_normal(random, values);
  }
}

}  // namespace foremoe
