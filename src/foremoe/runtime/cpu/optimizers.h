#pragma once

// Elementwise operations of training: sums, gradient descent, Adam and the squared error.

#include <cstdint>
#include <span>

namespace foremoe::cpu {

void add(std::span<float> to, const float* from);  // to += from
void sgd(std::span<float> weights, const float* gradient, float rate);

struct Adam {
  float rate = 1e-3F, beta1 = 0.9F, beta2 = 0.999F, epsilon = 1e-8F;
  int step = 1;  // ≥ 1, for bias correction
};
struct AdamMoments {
  float* mean = nullptr;
  float* square = nullptr;
};
// mean = β₁·mean + (1 − β₁)·g, square = β₂·square + (1 − β₂)·g²,
// weights −= rate · mean/(1 − β₁^step) ÷ (√(square/(1 − β₂^step)) + ε).
void adam(std::span<float> weights, const float* gradient, AdamMoments moments, const Adam& options);

// Sets gradient = (x − target)·scale. Returns Σ ½(x − target)²·scale, summed in double.
double squared_error(std::span<const float> x, const float* target, float scale, float* gradient);

}  // namespace foremoe::cpu
