#include "foremoe/runtime/cpu/experts.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace foremoe::cpu {

namespace {

// Blocks limit scratch memory and the number of rows in one float sum of a weight gradient.
constexpr std::int64_t kRowsPerBlock = 512;

// Calls step(row, rows) for each block of an expert's rows; `row` indexes the matrices of the call.
template <class Step>
void for_each_block(const ExpertRows& expert, const Step& step) {
  const std::int64_t end = expert.first_row + expert.rows;
  for (std::int64_t row = expert.first_row; row < end; row += kRowsPerBlock) {
    step(row, std::min(kRowsPerBlock, end - row));
  }
}

constexpr int kLanes = 4;
using Floats = float __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));

Floats load(const float* from, int lanes) {
  Floats v{};
  std::memcpy(&v, from, static_cast<std::size_t>(lanes) * sizeof(float));
  return v;
}

void store(float* to, Floats v, int lanes) { std::memcpy(to, &v, static_cast<std::size_t>(lanes) * sizeof(float)); }

// Computes eˣ for |x| ≤ 87, the range in which eˣ and e⁻ˣ are normal numbers; clamps larger |x| to 87. Factors out a
// power of two, which leaves |r| ≤ ½ ln 2. Evaluates eʳ by a polynomial of degree 7 (Cephes' expf).
Floats exponential(Floats x) {
  constexpr float kBound = 87.0F;
  x = x > kBound ? Floats{} + kBound : x;
  x = x < -kBound ? Floats{} - kBound : x;
  constexpr float kToInteger = 0x1.8p23F;  // adding this rounds to an integer in the low bits
  const Floats shifted = x * 1.44269504F + kToInteger;
  const Floats n = shifted - kToInteger;
  const Floats r = (x - n * 0.693359375F) + n * 2.12194440e-4F;  // split ln 2: the first product is exact
  Floats p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const Floats y = (p * (r * r) + r) + 1.0F;
  const Ints exponent = std::bit_cast<Ints>(shifted) - std::bit_cast<std::int32_t>(kToInteger);
  return y * std::bit_cast<Floats>((exponent + 127) << 23);
}

template <class Step>
void for_each_lanes(int n, const Step& step) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i, kLanes);
  if (i < n) step(i, n - i);
}

}  // namespace

ExpertsWorkspace::ExpertsWorkspace(ExpertShape expert_shape, bool independent)
    : shape(expert_shape), position_independent(independent) {
  const std::size_t block = static_cast<std::size_t>(kRowsPerBlock) * static_cast<std::size_t>(shape.intermediate);
  h.resize(block);
  dh.resize(block);
  d_gate_up.resize(2 * block);
  if (position_independent) {
    tiles.reserve(2 * shape.intermediate, shape.hidden);
    tiles.reserve(shape.hidden, shape.intermediate);
  }
}

void experts_forward(std::span<const ExpertRows> experts, const ForwardMatrices& matrices, ExpertsWorkspace& ws) {
  const int hidden = ws.shape.hidden, intermediate = ws.shape.intermediate;
  const auto project = [&](const Projection& size, const float* a, const float* b, float* c) {
    ws.position_independent ? project_by_tiles(size, a, b, c, ws.tiles) : foremoe::cpu::project(size, a, b, c);
  };
  for (const ExpertRows& expert : experts) {
    for_each_block(expert, [&](std::int64_t row, std::int64_t rows) {
      float* block = matrices.gate_up + row * 2 * intermediate;
      project({.rows = rows, .columns = 2 * intermediate, .depth = hidden}, matrices.x + row * hidden, expert.gate_up,
              block);
      swiglu(block, rows, intermediate, ws.h.data());
      project({.rows = rows, .columns = hidden, .depth = intermediate}, ws.h.data(), expert.down,
              matrices.y + row * hidden);
    });
  }
}

void experts_backward(std::span<const ExpertRows> experts, const BackwardMatrices& matrices, ExpertsWorkspace& ws) {
  const int hidden = ws.shape.hidden, intermediate = ws.shape.intermediate;
  for (const ExpertRows& expert : experts) {
    for_each_block(expert, [&](std::int64_t row, std::int64_t rows) {
      const bool fresh = expert.fresh_gradient && row == expert.first_row;
      const float* dy = matrices.dy + row * hidden;
      multiply({.rows = rows, .columns = intermediate, .depth = hidden}, dy, expert.down, ws.dh.data());
      swiglu_backward(matrices.gate_up + row * 2 * intermediate, ws.dh.data(), rows, intermediate,
                      {.h = ws.h.data(), .d_gate_up = ws.d_gate_up.data()});
      multiply({.rows = hidden, .columns = intermediate, .depth = rows, .transpose_a = true, .add = !fresh}, dy,
               ws.h.data(), expert.down_gradient);
      multiply({.rows = std::int64_t{2} * intermediate,
                .columns = hidden,
                .depth = rows,
                .transpose_a = true,
                .add = !fresh},
               ws.d_gate_up.data(), matrices.x + row * hidden, expert.gate_up_gradient);
      multiply({.rows = rows, .columns = hidden, .depth = std::int64_t{2} * intermediate}, ws.d_gate_up.data(),
               expert.gate_up, matrices.dx + row * hidden);
    });
  }
}

void swiglu(const float* gate_up, std::int64_t rows, int intermediate, float* h) {
  for (std::int64_t row = 0; row < rows; ++row, gate_up += std::ptrdiff_t{2} * intermediate, h += intermediate) {
    for_each_lanes(intermediate, [&](int i, int lanes) {
      const Floats g = load(gate_up + i, lanes);
      const Floats sigmoid = 1.0F / (1.0F + exponential(-g));
      store(h + i, g * sigmoid * load(gate_up + intermediate + i, lanes), lanes);
    });
  }
}

void swiglu_backward(const float* gate_up, const float* dh, std::int64_t rows, int intermediate, SwigluGradients out) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for_each_lanes(intermediate, [&](int i, int lanes) {
      const Floats g = load(gate_up + i, lanes);
      const Floats u = load(gate_up + intermediate + i, lanes);
      const Floats d = load(dh + i, lanes);
      const Floats e = exponential(-g);
      const Floats sigmoid = 1.0F / (1.0F + e);
      const Floats silu = g * sigmoid;
      // silu' = s·(1 + g·(1 − s)); 1 − s = e·s avoids cancellation
      const Floats slope = sigmoid * (1.0F + g * (e * sigmoid));
      store(out.h + i, silu * u, lanes);
      store(out.d_gate_up + i, d * u * slope, lanes);
      store(out.d_gate_up + intermediate + i, d * silu, lanes);
    });
    gate_up += std::ptrdiff_t{2} * intermediate;
    out.d_gate_up += std::ptrdiff_t{2} * intermediate;
    dh += intermediate;
    out.h += intermediate;
  }
}

}  // namespace foremoe::cpu
