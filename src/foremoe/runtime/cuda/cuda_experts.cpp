#include "foremoe/runtime/cuda/cuda_experts.h"

#include <algorithm>

#include "foremoe/runtime/cuda/cuda_check.h"
#include "foremoe/runtime/cuda/update_kernels.h"

namespace foremoe::cuda {
namespace {

// The rows of all experts, one range; rows between them that are nobody's are computed and not used.
struct RowRange {
  std::int64_t first = 0;
  std::int64_t end = 0;
};

RowRange rows_of(std::span<const ExpertRows> experts) {
  RowRange range;
  bool any = false;
  for (const ExpertRows& expert : experts) {
    if (expert.rows == 0) continue;
    range.first = any ? std::min(range.first, expert.first_row) : expert.first_row;
    range.end = std::max(range.end, expert.first_row + expert.rows);
    any = true;
  }
  return range;
}

}  // namespace

struct CudaExperts::Weights {
  const float* ExpertRows::*of = nullptr;
  int columns = 0;
  int depth = 0;
};

CudaExperts::CudaExperts(cudaStream_t stream, StagingRing& ring, Allocate allocate)
    : stream_(stream), ring_(ring), allocate_(std::move(allocate)), gemm_(stream, ring) {}

void CudaExperts::reserve(std::int64_t rows, ExpertShape shape) {
  const auto narrow = Bytes{rows * shape.intermediate * static_cast<std::int64_t>(sizeof(float))};
  const auto grow = [&](DeviceMemory& memory, Bytes bytes) {
    if (memory.bytes() >= bytes) return;
    wait_for(stream_);  // what is enqueued may still use the old one
    memory = {};
    memory = allocate_(bytes);
  };
  grow(activation_, narrow);
  grow(d_activation_, narrow);
  grow(d_gate_up_, narrow + narrow);
}

void CudaExperts::multiply_by_weights(std::span<const ExpertRows> experts, const Weights& weights, const float* x,
                                      float* y) {
  if (position_independent_) {
    tiles_.clear();
    for (const ExpertRows& expert : experts) {
      for (std::int64_t row = 0; row < expert.rows; row += kTileRows) {
        const auto rows = static_cast<std::int32_t>(std::min<std::int64_t>(kTileRows, expert.rows - row));
        tiles_.push_back({.b = expert.*weights.of, .first_row = expert.first_row + row, .rows = rows});
      }
    }
    multiply({.tiles = ring_.stage(std::span<const RowTile>(tiles_)),
              .num_tiles = static_cast<std::int64_t>(tiles_.size()),
              .a = x,
              .c = y,
              .columns = weights.columns,
              .depth = weights.depth},
             stream_);
    return;
  }
  gemms_.clear();
  for (const ExpertRows& expert : experts) {
    if (expert.rows == 0) continue;
    gemms_.push_back({.a = x + expert.first_row * weights.depth,
                      .b = expert.*weights.of,
                      .c = y + expert.first_row * weights.columns,
                      .rows = expert.rows,
                      .columns = weights.columns,
                      .depth = weights.depth});
  }
  gemm_.multiply(gemms_, GemmForm::kTransposedB);
}

void CudaExperts::forward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, float* gate_up,
                          float* y) {
  const RowRange range = rows_of(experts);
  reserve(range.end, shape);
  const int wide = 2 * shape.intermediate;
  multiply_by_weights(experts, {.of = &ExpertRows::gate_up, .columns = wide, .depth = shape.hidden}, x, gate_up);
  swiglu({.gate_up = gate_up,
          .activation = activation_.floats(),
          .first = range.first,
          .rows = range.end - range.first,
          .intermediate = shape.intermediate},
         stream_);
  multiply_by_weights(experts, {.of = &ExpertRows::down, .columns = shape.hidden, .depth = shape.intermediate},
                      activation_.floats(), y);
}

void CudaExperts::cut_gradients(std::span<const ExpertRows> experts) {
  parts_.clear();
  for (const ExpertRows& expert : experts) {
    int round = 0;
    for (const GradientPart& part : parts_) {
      if (part.expert->down_gradient == expert.down_gradient) round = part.round + 1;
    }
    for (std::int64_t row = 0; row < expert.rows; row += kGradientRows) {
      parts_.push_back({.expert = &expert,
                        .first_row = expert.first_row + row,
                        .rows = std::min(kGradientRows, expert.rows - row),
                        .round = round++,
                        .add = row > 0 || !expert.fresh_gradient});
    }
  }
}

template <class GemmOf>
void CudaExperts::multiply_gradients(GemmOf gemm_of) {
  int rounds = 0;
  for (const GradientPart& part : parts_) rounds = std::max(rounds, part.round + 1);
  for (int round = 0; round < rounds; ++round) {
    gemms_.clear();
    for (const GradientPart& part : parts_) {
      if (part.round == round) gemms_.push_back(gemm_of(part));
    }
    gemm_.multiply(gemms_, GemmForm::kTransposedA);
  }
}

void CudaExperts::backward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, const float* gate_up,
                           const Gradients& gradients) {
  const RowRange range = rows_of(experts);
  reserve(range.end, shape);
  const std::int64_t hidden = shape.hidden, narrow = shape.intermediate, wide = 2 * narrow;
  float *activation = activation_.floats(), *d_activation = d_activation_.floats(), *d_gate_up = d_gate_up_.floats();
  const auto for_each = [&](auto&& gemm_of) {
    gemms_.clear();
    for (const ExpertRows& expert : experts) {
      if (expert.rows > 0) gemms_.push_back(gemm_of(expert, expert.first_row));
    }
    gemm_.multiply(gemms_, GemmForm::kNormal);
  };

  for_each([&](const ExpertRows& expert, std::int64_t row) {
    return Gemm{.a = gradients.dy + row * hidden,
                .b = expert.down,
                .c = d_activation + row * narrow,
                .rows = expert.rows,
                .columns = narrow,
                .depth = hidden};
  });
  swiglu_backward({.gate_up = gate_up,
                   .activation = activation,
                   .first = range.first,
                   .rows = range.end - range.first,
                   .intermediate = shape.intermediate},
                  d_activation, d_gate_up, stream_);
  cut_gradients(experts);
  multiply_gradients([&](const GradientPart& part) {
    return Gemm{.a = gradients.dy + part.first_row * hidden,
                .b = activation + part.first_row * narrow,
                .c = part.expert->down_gradient,
                .rows = hidden,
                .columns = narrow,
                .depth = part.rows,
                .add = part.add};
  });
  multiply_gradients([&](const GradientPart& part) {
    return Gemm{.a = d_gate_up + part.first_row * wide,
                .b = x + part.first_row * hidden,
                .c = part.expert->gate_up_gradient,
                .rows = wide,
                .columns = hidden,
                .depth = part.rows,
                .add = part.add};
  });
  for_each([&](const ExpertRows& expert, std::int64_t row) {
    return Gemm{.a = d_gate_up + row * wide,
                .b = expert.gate_up,
                .c = gradients.dx + row * hidden,
                .rows = expert.rows,
                .columns = hidden,
                .depth = wide};
  });
}

}  // namespace foremoe::cuda
