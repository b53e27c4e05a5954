#include "foremoe/runtime/cpu/optimizers.h"

#include <cmath>

namespace foremoe::cpu {

void sgd(float* weights, const float* gradient, std::int64_t n, float rate) {
  for (std::int64_t i = 0; i < n; ++i) weights[i] -= rate * gradient[i];
}

void adam(float* weights, const float* gradient, AdamMoments moments, std::int64_t n, const Device::Adam& options) {
  // The corrections 1 ÷ (1 − βᵗ) lose all digits in float when t is small.
  const auto mean_scale = static_cast<float>(1 / (1 - std::pow(double{options.beta1}, options.step)));
  const auto square_scale = static_cast<float>(1 / (1 - std::pow(double{options.beta2}, options.step)));
  const float beta1 = options.beta1, beta2 = options.beta2, rest1 = 1 - beta1, rest2 = 1 - beta2;
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = gradient[i];
    const float mean = beta1 * moments.mean[i] + rest1 * g;
    const float square = beta2 * moments.square[i] + rest2 * (g * g);
    moments.mean[i] = mean;
    moments.square[i] = square;
    weights[i] -= options.rate * (mean * mean_scale) / (std::sqrt(square * square_scale) + options.epsilon);
  }
}

double squared_error(Pair values, std::int64_t n, float scale, float* gradient) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float difference = values.x[i] - values.target[i];
    gradient[i] = difference * scale;
    sum += 0.5 * double{difference} * double{difference};
  }
  return sum * double{scale};
}

}  // namespace foremoe::cpu
