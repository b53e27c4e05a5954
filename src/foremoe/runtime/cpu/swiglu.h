#pragma once

// The activation between an expert's two projections, h = silu(g) ∘ u, row by row. gate_up [rows][2·intermediate] holds
// g before u. Within 3 units of the last place of float32, four lanes at a time; a row's bits depend on that row alone.

#include <cstdint>

namespace foremoe::cpu {

void swiglu(const float* gate_up, std::int64_t rows, int intermediate, float* h);

// h once more, and the gradients of g and u, from dh [rows][intermediate].
struct SwigluGradients {
  float* h = nullptr;          // [rows][intermediate]
  float* d_gate_up = nullptr;  // [rows][2·intermediate]
};
void swiglu_backward(const float* gate_up, const float* dh, std::int64_t rows, int intermediate, SwigluGradients out);

}  // namespace foremoe::cpu
