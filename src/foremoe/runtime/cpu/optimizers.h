#pragma once

// Elementwise steps of training: gradient descent, Adam and the squared error.

#include <cstdint>

#include "foremoe/runtime/device.h"

namespace foremoe::cpu {

void sgd(float* weights, const float* gradient, std::int64_t n, float rate);

struct AdamMoments {
  float* mean = nullptr;
  float* square = nullptr;
};
void adam(float* weights, const float* gradient, AdamMoments moments, std::int64_t n, const Device::Adam& options);

struct Pair {
  const float* x = nullptr;
  const float* target = nullptr;
};
double squared_error(Pair values, std::int64_t n, float scale, float* gradient);

}  // namespace foremoe::cpu
