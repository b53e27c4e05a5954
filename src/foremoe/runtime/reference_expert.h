#pragma once

// One SwiGLU expert in float64 over gathered rows, as reference_model.h needs it.

#include <span>
#include <vector>

#include "foremoe/runtime/device.h"

namespace foremoe {

class ReferenceExpert {
 public:
  // `weights`: gate_up, then down.
  ReferenceExpert(ExpertShape shape, std::span<const double> weights) : shape_(shape), weights_(weights) {}

  // y [rows][hidden] of x [rows][hidden]; the activations are kept for backward().
  std::vector<double> forward(std::vector<double> x);
  // Adds the weights' gradient; returns dx [rows][hidden].
  std::vector<double> backward(std::span<const double> dy, std::span<double> gradient) const;

 private:
  const double* gate_up() const { return weights_.data(); }
  const double* down() const { return weights_.data() + down_offset(); }
  std::size_t down_offset() const;

  ExpertShape shape_;
  std::span<const double> weights_;
  std::vector<double> x_;        // [rows][hidden]
  std::vector<double> gate_up_;  // [rows][2·intermediate]
  std::vector<double> h_;        // [rows][intermediate]
};

}  // namespace foremoe
