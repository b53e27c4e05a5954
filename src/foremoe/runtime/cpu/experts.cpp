#include "foremoe/runtime/cpu/experts.h"

#include <algorithm>

#include "foremoe/runtime/cpu/gemm.h"
#include "foremoe/runtime/cpu/swiglu.h"

namespace foremoe::cpu {

namespace {

constexpr std::int64_t kRowsPerBlock = 512;

// Calls step(row, rows) for each block of an expert's rows; row counts within the call's matrices.
template <class Step>
void for_each_block(const ExpertRows& expert, const Step& step) {
  const std::int64_t end = expert.first_row + expert.rows;
  for (std::int64_t row = expert.first_row; row < end; row += kRowsPerBlock) {
    step(row, std::min(kRowsPerBlock, end - row));
  }
}

}  // namespace

void Experts::reserve(ExpertShape shape) {
  const std::size_t block = static_cast<std::size_t>(kRowsPerBlock) * static_cast<std::size_t>(shape.intermediate);
  h_.resize(std::max(h_.size(), block));
  dh_.resize(std::max(dh_.size(), block));
  d_gate_up_.resize(std::max(d_gate_up_.size(), 2 * block));
  if (by_tiles_) {
    tiles_.reserve(2 * shape.intermediate, shape.hidden);
    tiles_.reserve(shape.hidden, shape.intermediate);
  }
}

void Experts::project(GemmSize size, const float* a, const float* b, float* c) {
  if (by_tiles_) {
    multiply_transposed_by_tiles(size, a, b, c, tiles_);
  } else {
    multiply_transposed(size, a, b, c);
  }
}

void Experts::forward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, float* gate_up,
                      float* y) {
  reserve(shape);
  const int hidden = shape.hidden, intermediate = shape.intermediate;
  for (const ExpertRows& expert : experts) {
    for_each_block(expert, [&](std::int64_t row, std::int64_t rows) {
      float* block = gate_up + row * 2 * intermediate;
      project({.rows = rows, .columns = 2 * intermediate, .depth = hidden}, x + row * hidden, expert.gate_up, block);
      swiglu(block, rows, intermediate, h_.data());
      project({.rows = rows, .columns = hidden, .depth = intermediate}, h_.data(), expert.down, y + row * hidden);
    });
  }
}

void Experts::backward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, const float* gate_up,
                       Gradients gradients) {
  reserve(shape);
  const int hidden = shape.hidden, intermediate = shape.intermediate;
  for (const ExpertRows& expert : experts) {
    for_each_block(expert, [&](std::int64_t row, std::int64_t rows) {
      const bool fresh = expert.fresh_gradient && row == expert.first_row;
      const float* dy = gradients.dy + row * hidden;
      multiply({.rows = rows, .columns = intermediate, .depth = hidden}, dy, expert.down, dh_.data());
      swiglu_backward(gate_up + row * 2 * intermediate, dh_.data(), rows, intermediate,
                      {.h = h_.data(), .d_gate_up = d_gate_up_.data()});
      add_outer({.rows = hidden, .columns = intermediate, .summed = rows}, dy, h_.data(), fresh, expert.down_gradient);
      add_outer({.rows = 2 * intermediate, .columns = hidden, .summed = rows}, d_gate_up_.data(), x + row * hidden,
                fresh, expert.gate_up_gradient);
      multiply({.rows = rows, .columns = hidden, .depth = 2 * intermediate}, d_gate_up_.data(), expert.gate_up,
               gradients.dx + row * hidden);
    });
  }
}

}  // namespace foremoe::cpu
