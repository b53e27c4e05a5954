#include "foremoe/runtime/cpu/optimizers.h"

#include <cmath>

namespace foremoe::cpu {

void add(std::span<float> to, const float* from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

void sgd(std::span<float> weights, const float* gradient, float rate) {
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= rate * gradient[i];
}

void adam(std::span<float> weights, const float* gradient, AdamMoments moments, const Adam& options) {
  // Computed in double: the corrections 1 ÷ (1 − βᵗ) lose all digits in float for small t.
  const auto mean_scale = static_cast<float>(1 / (1 - std::pow(double{options.beta1}, options.step)));
  const auto square_scale = static_cast<float>(1 / (1 - std::pow(double{options.beta2}, options.step)));
  const float beta1 = options.beta1, beta2 = options.beta2, rest1 = 1 - beta1, rest2 = 1 - beta2;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const float g = gradient[i];
    const float mean = beta1 * moments.mean[i] + rest1 * g;
    const float square = beta2 * moments.square[i] + rest2 * (g * g);
    moments.mean[i] = mean;
    moments.square[i] = square;
    weights[i] -= options.rate * (mean * mean_scale) / (std::sqrt(square * square_scale) + options.epsilon);
  }
}

double squared_error(std::span<const float> x, const float* target, float scale, float* gradient) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float difference = x[i] - target[i];
    gradient[i] = difference * scale;
    sum += 0.5 * double{difference} * double{difference};
  }
  return sum * double{scale};
}

}  // namespace foremoe::cpu
