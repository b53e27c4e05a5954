#pragma once

// SwiGLU experts over blocks of rows: y = (silu(x·Gᵀ) ∘ (x·Uᵀ))·Dᵀ, where gate_up [2·intermediate][hidden] is G above U
// and down is D [hidden][intermediate]. Equal operands produce equal bits in every run, at any memory address.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/runtime/cpu/multiply.h"
#include "foremoe/runtime/cpu/row_tiles.h"

namespace foremoe {

struct ExpertShape {
  int hidden = 0;        // width of a token
  int intermediate = 0;  // width inside an expert
};

}  // namespace foremoe

namespace foremoe::cpu {

// Rows of one expert, contiguous in the row matrices of a call. An expert may have several such blocks in one call;
// only its first block may have a fresh gradient.
struct ExpertRows {
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  const float* gate_up = nullptr;
  const float* down = nullptr;
  float* gate_up_gradient = nullptr;  // used only by the backward, as are the next two members
  float* down_gradient = nullptr;
  bool fresh_gradient = false;  // overwrite the gradient instead of adding to it
};

// Scratch memory of a thread that runs experts of one shape.
struct ExpertsWorkspace {
  // position_independent: in the forward, the bits of a row do not depend on its position (row_tiles.h).
  explicit ExpertsWorkspace(ExpertShape shape, bool position_independent = false);

  const ExpertShape shape;
  const bool position_independent;
  TileWorkspace tiles;
  std::vector<float> h;          // [row of block][intermediate]
  std::vector<float> dh;         // [row of block][intermediate]
  std::vector<float> d_gate_up;  // [row of block][2·intermediate]
};

struct ForwardMatrices {
  const float* x = nullptr;  // [rows][hidden]
  float* gate_up = nullptr;  // [rows][2·intermediate], saved for the backward
  float* y = nullptr;        // [rows][hidden]
};
void experts_forward(std::span<const ExpertRows> experts, const ForwardMatrices& matrices, ExpertsWorkspace& workspace);

struct BackwardMatrices {
  const float* x = nullptr;        // [rows][hidden], from the forward
  const float* gate_up = nullptr;  // [rows][2·intermediate], from the forward
  const float* dy = nullptr;       // [rows][hidden]
  float* dx = nullptr;             // [rows][hidden]
};
// Adds to the gradients of every expert that has rows; overwrites fresh gradients.
void experts_backward(std::span<const ExpertRows> experts, const BackwardMatrices& matrices,
                      ExpertsWorkspace& workspace);

// Activation between the two projections of an expert, h = silu(g) ∘ u, row by row. gate_up [rows][2·intermediate]
// contains g, then u. The error of h is at most kSwigluUnits float32 ULPs. The error of its slope is at most
// kSwigluSlopeUnits ULPs of the terms. Processes four lanes at a time. The bits of a row depend only on that row.
inline constexpr int kSwigluUnits = 3;
inline constexpr int kSwigluSlopeUnits = 5;
void swiglu(const float* gate_up, std::int64_t rows, int intermediate, float* h);

// Recomputes h, and computes the gradients of g and u from dh [rows][intermediate].
struct SwigluGradients {
  float* h = nullptr;          // [rows][intermediate]
  float* d_gate_up = nullptr;  // [rows][2·intermediate]
};
void swiglu_backward(const float* gate_up, const float* dh, std::int64_t rows, int intermediate, SwigluGradients out);

}  // namespace foremoe::cpu
