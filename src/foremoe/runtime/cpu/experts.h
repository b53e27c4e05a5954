#pragma once

// Forward and backward of SwiGLU experts over blocks of rows: the blocks keep scratch memory small, and the sums of
// weight gradients over very many rows short.

#include <span>
#include <vector>

#include "foremoe/runtime/cpu/row_tiles.h"
#include "foremoe/runtime/device.h"

namespace foremoe::cpu {

class Experts {
 public:
  void reserve(ExpertShape shape);  // later calls of this shape allocate nothing
  void use_position_independent_rows(bool on) { by_tiles_ = on; }
  void forward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, float* gate_up, float* y);
  struct Gradients {
    const float* dy = nullptr;
    float* dx = nullptr;
  };
  void backward(std::span<const ExpertRows> experts, ExpertShape shape, const float* x, const float* gate_up,
                Gradients gradients);

 private:
  void project(GemmSize size, const float* a, const float* b, float* c);

  bool by_tiles_ = false;
  TileWorkspace tiles_;
  std::vector<float> h_;          // [row of block][intermediate]
  std::vector<float> dh_;         // likewise
  std::vector<float> d_gate_up_;  // [row of block][2·intermediate]
};

}  // namespace foremoe::cpu
