#pragma once

// One SwiGLU expert in float64 over gathered rows, as reference_model.h needs it, and what float32 may make of it.
//
// Errors. A variance estimates the mean square of the error that a right computation in float32 has, in units of
//   (2⁻²⁴)², to first order: every rounding contributes the square of its greatest relative error, and independent
//   errors add in squares (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019). A sum of n
//   terms has n roundings, each at most of the size of the sum or of the terms' root sum of squares: n·(sum² + Σ
//   terms²).

#include <span>
#include <vector>

#include "foremoe/runtime/cpu/experts.h"

namespace foremoe {

inline double squared(double x) { return x * x; }

struct Rounded {
  std::vector<double> value;
  std::vector<double> variance;  // [of each value]; empty where it is not asked for
};

// Where a gradient is added, and its variance if that is asked for.
struct RoundedSum {
  std::span<double> value;
  std::span<double> variance;
  double terms = 0;  // of each sum, in all that is added
};

class ReferenceExpert {
 public:
  // `weights`: gate_up, then down; exact in float32 where variances are asked for.
  ReferenceExpert(ExpertShape shape, std::span<const double> weights);

  // y [rows][hidden] of x [rows][hidden], with variance where x has one; the activations are kept for backward().
  Rounded forward(Rounded x);
  // Adds the weights' gradient; returns dx [rows][hidden].
  Rounded backward(const Rounded& dy, const RoundedSum& gradient) const;

 private:
  struct Weights {
    const double* values = nullptr;
    std::size_t size = 0;
    std::size_t columns = 0;  // of the product
    std::size_t depth = 0;
    bool transposed = false;
  };
  Rounded project(const Rounded& x, const Weights& weights) const;
  std::size_t rows() const { return x_.value.size() / hidden_; }

  std::size_t hidden_, intermediate_;
  std::span<const double> gate_up_weights_, down_weights_;
  Rounded x_;        // [rows][hidden]
  Rounded gate_up_;  // [rows][2·intermediate]
  Rounded h_;        // [rows][intermediate]
};

}  // namespace foremoe
