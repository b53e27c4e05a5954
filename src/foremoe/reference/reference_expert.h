#pragma once

// One SwiGLU expert in float64 over gathered rows, for reference_model.h, and an estimate of float32 rounding errors.
//
// Errors. A variance estimates the mean squared error of a correct float32 computation, in units of (2⁻²⁴)², to first
//   order. Every rounding contributes the square of its maximum relative error, and squares of independent errors add
//   (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019). A sum of n terms contributes
//   n·(sum² + Σ terms²): n roundings, where sum² + Σ terms² estimates a partial sum's square.

#include <span>
#include <vector>

#include "foremoe/runtime/cpu/experts.h"

namespace foremoe {

inline double squared(double x) { return x * x; }

struct Rounded {
  std::vector<double> value;
  std::vector<double> variance;  // [value]; empty unless requested
};

// Destination of a gradient, and of its variance if requested.
struct RoundedSum {
  std::span<double> value;
  std::span<double> variance;
  double terms = 0;  // number of terms per sum, over all calls that add to it
};

class ReferenceExpert {
 public:
  // `weights`: gate_up, then down. Variances require weights that are exact in float32.
  ReferenceExpert(ExpertShape shape, std::span<const double> weights);

  // Returns y [rows][hidden] from x [rows][hidden], with variances if x has them. Saves activations for backward().
  Rounded forward(Rounded x);
  // Adds the gradient of the weights. Returns dx [rows][hidden].
  Rounded backward(const Rounded& dy, const RoundedSum& gradient) const;

 private:
  struct Weights {
    const double* values = nullptr;
    std::size_t size = 0;
    std::size_t columns = 0;  // columns of the product
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
