#pragma once

// Shared by the tests of cpu/: random values, modifiable copies of values, and the error bound.

#include <gtest/gtest.h>

#include <deque>
#include <span>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/reference/tensor_error.h"

namespace foremoe::test {

// Bound on ‖x − reference‖∞ ÷ ‖reference‖∞ of every tensor, where the reference is computed in float64.
inline constexpr double kTolerance = 1e-5;

class Arithmetic : public testing::Test {
 protected:
  // Returns a copy that lives until the test ends.
  float* put(std::span<const float> values) { return memory_.emplace_back(values.begin(), values.end()).data(); }
  float* put(std::size_t n, float value) { return put(std::vector<float>(n, value)); }
  static std::vector<float> get(const float* from, std::size_t n) { return {from, from + n}; }

  // Uniform in [low, low + 2).
  std::vector<float> random_values(std::size_t n, double low = -1) {
    std::vector<float> values(n);
    for (float& v : values) v = static_cast<float>(low + 2 * random_.uniform());
    return values;
  }

  Random& random() { return random_; }

 private:
  std::deque<std::vector<float>> memory_;
  Random random_{11};
};

inline std::vector<double> to_double(std::span<const float> values) { return {values.begin(), values.end()}; }

// Central differences of f with respect to every element of `at`.
template <class Function>
std::vector<double> slopes(const Function& f, std::vector<double> at) {
  constexpr double kStep = 1e-5;
  std::vector<double> result;
  for (double& v : at) {
    const double before = v;
    v = before + kStep;
    const double above = f(at);
    v = before - kStep;
    result.push_back((above - f(at)) / (2 * kStep));
    v = before;
  }
  return result;
}

inline double inner_product(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace foremoe::test
