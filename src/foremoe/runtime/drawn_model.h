#pragma once

// What the seed says of a model: everything is drawn by (what, layer, expert, micro-step, source), so that any rank,
// and the reference, draws the same.

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

// What the seed says, row-major float32, on the host.
enum class Tensor : std::uint8_t { kGateUp, kDown, kRouter, kInput, kTarget };
struct TensorKey {
  Tensor tensor{};
  int a = 0;  // layer; micro-step for inputs and targets
  int b = 0;  // expert; source rank for inputs and targets; 0 for routers
};
// gate_up and router uniform with variance 1/hidden, down 1/intermediate, inputs and targets standard normal.
void draw(const ModelSize& size, const TensorKey& key, std::span<float> values);

}  // namespace foremoe
