#pragma once

// Weights and data of a model, drawn from a seed. Every tensor depends only on the seed and its key (tensor, layer,
// expert, micro-step, source), so all ranks and the reference draw the same values.

#include <cstdint>
#include <span>

#include "foremoe/runtime/cpu/experts.h"

namespace foremoe {

struct ModelSize {
  int layers = 1;
  int experts = 1;
  int top_k = 1;
  ExpertShape shape;
  std::uint64_t seed = 0;
};

// Tensors that are drawn: row-major float32, in host memory.
enum class Tensor : std::uint8_t { kGateUp, kDown, kRouter, kInput, kTarget };
struct TensorKey {
  Tensor tensor{};
  int a = 0;  // layer; micro-step for inputs and targets
  int b = 0;  // expert; source rank for inputs and targets; 0 for routers
};
// gate_up, router: uniform, variance 1/hidden. down: uniform, variance 1/intermediate. Others: standard normal.
void draw(const ModelSize& size, const TensorKey& key, std::span<float> values);

}  // namespace foremoe
