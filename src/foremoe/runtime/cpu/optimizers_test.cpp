#include "foremoe/runtime/cpu/optimizers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "foremoe/testing/arithmetic.h"

namespace foremoe::cpu {
namespace {

using namespace foremoe::test;

constexpr std::size_t kUpdateSizes[] = {0, 1, 7, 1000, 100'003};

TEST_F(Arithmetic, AddAddsAndGradientDescentSubtracts) {
  for (const std::size_t n : kUpdateSizes) {
    const std::vector<float> before = random_values(n), from = random_values(n);
    float *sum = put(before), *weights = put(before);
    add({sum, n}, put(from));
    sgd({weights, n}, put(from), 0.5F);
    std::vector<double> expected_sum = to_double(before), expected_weights = expected_sum;
    for (std::size_t i = 0; i < n; ++i) {
      expected_sum[i] += from[i];
      expected_weights[i] -= 0.5 * from[i];
    }
    EXPECT_LE(relative_error(get(sum, n), expected_sum), kTolerance) << n;
    EXPECT_LE(relative_error(get(weights, n), expected_weights), kTolerance) << n;
  }
}

TEST_F(Arithmetic, AdamFollowsFloat64OverItsFirstSteps) {
  for (const std::size_t n : kUpdateSizes) {
    const std::vector<float> before = random_values(n);
    float *weights = put(before), *mean = put(n, 0), *square = put(n, 0);
    std::vector<double> expected = to_double(before), m(n), v(n);
    Adam options{.rate = 0.01F};
    for (; options.step <= 4; ++options.step) {
      const std::vector<float> gradient = random_values(n);
      adam({weights, n}, put(gradient), {.mean = mean, .square = square}, options);
      const double beta1 = options.beta1, beta2 = options.beta2;
      for (std::size_t i = 0; i < n; ++i) {
        const double g = gradient[i];
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        expected[i] -= options.rate * m[i] / (1 - std::pow(beta1, options.step)) /
                       (std::sqrt(v[i] / (1 - std::pow(beta2, options.step))) + double{options.epsilon});
      }
    }
    EXPECT_LE(relative_error(get(weights, n), expected), kTolerance) << n;
    EXPECT_LE(relative_error(get(mean, n), m), kTolerance) << n;
    EXPECT_LE(relative_error(get(square, n), v), kTolerance) << n;
  }
}

TEST_F(Arithmetic, SquaredErrorSumsInDouble) {
  for (const std::size_t n : kUpdateSizes) {
    const std::vector<float> x = random_values(n), target = random_values(n);
    constexpr float kScale = 0.125F;
    float* gradient = put(n, 9);
    const double loss = squared_error(x, put(target), kScale, gradient);
    double expected = 0;
    std::vector<double> expected_gradient(n);
    for (std::size_t i = 0; i < n; ++i) {
      const double difference = double{x[i]} - target[i];
      expected += 0.5 * difference * difference * kScale;
      expected_gradient[i] = difference * kScale;
    }
    EXPECT_NEAR(loss, expected, 1e-7 * expected) << n;
    EXPECT_LE(relative_error(get(gradient, n), expected_gradient), kTolerance) << n;
  }
}

}  // namespace
}  // namespace foremoe::cpu
