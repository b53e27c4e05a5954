#pragma once

// Seeded random numbers that are the same with every standard library. The C++ standard fixes the output of
// std::mt19937_64, but not that of the standard distributions, so this class implements its own distributions.

#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>

namespace foremoe {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t bits() { return engine_(); }

  // Uniform in [0, 1), 53 bits.
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1.0p-53; }

  // Uniform in [0, n), n > 0, without modulo bias.
  std::uint64_t below(std::uint64_t n) {
    const std::uint64_t limit = -n % n;  // 2^64 mod n
    std::uint64_t x = engine_();
    while (x < limit) x = engine_();
    return x % n;
  }

  // Standard normal (Box–Muller, using one number of the pair).
  double normal() {
    const double u = 1.0 - uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace foremoe
