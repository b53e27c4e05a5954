#include "foremoe/reference/reference_expert.h"

#include <cmath>
#include <utility>

namespace foremoe {

namespace {

std::vector<double> squares(std::span<const double> values) {
  std::vector<double> result(values.begin(), values.end());
  for (double& v : result) v *= v;
  return result;
}

// The activation and its derivatives at one g.
struct Silu {
  explicit Silu(double g)
      : sigmoid(1 / (1 + std::exp(-g))),
        value(g * sigmoid),
        slope(sigmoid + g * sigmoid * (1 - sigmoid)),
        curvature(sigmoid * (1 - sigmoid) * (2 + g * (1 - 2 * sigmoid))),
        slope_parts(sigmoid + std::abs(g) * sigmoid * (1 - sigmoid)) {}
  double sigmoid, value, slope, curvature, slope_parts;
};

// Relative errors, in units of 2⁻²⁴, half a float32 ULP.
constexpr double kActivationError = 2 * cpu::kSwigluUnits;
constexpr double kSlopeError = 2 * cpu::kSwigluSlopeUnits;

using Product = cpu::Product;
std::int64_t size(std::size_t n) { return static_cast<std::int64_t>(n); }

}  // namespace

ReferenceExpert::ReferenceExpert(ExpertShape shape, std::span<const double> weights)
    : hidden_(static_cast<std::size_t>(shape.hidden)),
      intermediate_(static_cast<std::size_t>(shape.intermediate)),
      gate_up_weights_(weights.first(2 * hidden_ * intermediate_)),
      down_weights_(weights.subspan(2 * hidden_ * intermediate_)) {}

Rounded ReferenceExpert::project(const Rounded& x, const Weights& weights) const {
  const std::size_t num_rows = rows();
  const Product product{.rows = size(num_rows),
                        .columns = size(weights.columns),
                        .depth = size(weights.depth),
                        .transpose_b = weights.transposed};
  Rounded y{.value = std::vector<double>(num_rows * weights.columns), .variance = {}};
  cpu::multiply(product, x.value.data(), weights.values, y.value.data());
  if (x.variance.empty()) return y;
  const auto n = static_cast<double>(weights.depth);
  std::vector<double> of_terms = x.variance;
  for (std::size_t i = 0; i < of_terms.size(); ++i) of_terms[i] += n * squared(x.value[i]);
  y.variance.resize(y.value.size());
  const std::vector<double> weight_squares = squares({weights.values, weights.size});
  cpu::multiply(product, of_terms.data(), weight_squares.data(), y.variance.data());
  for (std::size_t i = 0; i < y.value.size(); ++i) y.variance[i] += n * squared(y.value[i]);
  return y;
}

Rounded ReferenceExpert::forward(Rounded x) {
  x_ = std::move(x);
  gate_up_ = project(x_, {.values = gate_up_weights_.data(),
                          .size = gate_up_weights_.size(),
                          .columns = 2 * intermediate_,
                          .depth = hidden_,
                          .transposed = true});
  const bool bounded = !x_.variance.empty();
  h_.value.resize(rows() * intermediate_);
  h_.variance.resize(bounded ? h_.value.size() : 0);
  for (std::size_t row = 0; row < rows(); ++row) {
    for (std::size_t i = 0; i < intermediate_; ++i) {
      const std::size_t at = row * intermediate_ + i, at_g = row * 2 * intermediate_ + i, at_u = at_g + intermediate_;
      const Silu silu(gate_up_.value[at_g]);
      const double u = gate_up_.value[at_u];
      h_.value[at] = silu.value * u;
      if (bounded) {
        h_.variance[at] = squared(silu.slope * u) * gate_up_.variance[at_g] +
                          squared(silu.value) * gate_up_.variance[at_u] + squared(kActivationError * h_.value[at]);
      }
    }
  }
  return project(h_, {.values = down_weights_.data(),
                      .size = down_weights_.size(),
                      .columns = hidden_,
                      .depth = intermediate_,
                      .transposed = true});
}

Rounded ReferenceExpert::backward(const Rounded& dy, const RoundedSum& gradient) const {
  const bool bounded = !dy.variance.empty();
  const Rounded dh = project(
      dy, {.values = down_weights_.data(), .size = down_weights_.size(), .columns = intermediate_, .depth = hidden_});
  Rounded d_gate_up{.value = std::vector<double>(gate_up_.value.size()), .variance = {}};
  d_gate_up.variance.resize(bounded ? d_gate_up.value.size() : 0);
  for (std::size_t row = 0; row < rows(); ++row) {
    for (std::size_t i = 0; i < intermediate_; ++i) {
      const std::size_t at = row * intermediate_ + i, at_g = row * 2 * intermediate_ + i, at_u = at_g + intermediate_;
      const Silu silu(gate_up_.value[at_g]);
      const double u = gate_up_.value[at_u], d = dh.value[at];
      d_gate_up.value[at_g] = d * u * silu.slope;
      d_gate_up.value[at_u] = d * silu.value;
      if (!bounded) continue;
      const double of_g = gate_up_.variance[at_g], of_u = gate_up_.variance[at_u], of_d = dh.variance[at];
      d_gate_up.variance[at_g] = squared(u * silu.slope) * of_d + squared(d * silu.slope) * of_u +
                                 squared(d * u * silu.curvature) * of_g +
                                 squared(kSlopeError * d * u * silu.slope_parts);
      d_gate_up.variance[at_u] = squared(silu.value) * of_d + squared(d * silu.slope) * of_g +
                                 squared(kActivationError * d_gate_up.value[at_u]);
    }
  }

  // Adds Σ over rows of a[row][·]·b[row][·], and its variance except for the rounding of the sum itself.
  const std::size_t down = gate_up_weights_.size();
  const auto add_outer = [&](const Rounded& a, const Rounded& b, std::size_t first, std::size_t columns) {
    const Product product{.rows = size(rows() == 0 ? 0 : a.value.size() / rows()),
                          .columns = size(columns),
                          .depth = size(rows()),
                          .transpose_a = true,
                          .add = true};
    cpu::multiply(product, a.value.data(), b.value.data(), gradient.value.data() + first);
    if (!bounded) return;
    std::vector<double> of_a = a.variance;
    for (std::size_t i = 0; i < of_a.size(); ++i) of_a[i] += gradient.terms * squared(a.value[i]);
    double* const sum = gradient.variance.data() + first;
    cpu::multiply(product, of_a.data(), squares(b.value).data(), sum);
    cpu::multiply(product, squares(a.value).data(), b.variance.data(), sum);
  };
  add_outer(d_gate_up, x_, 0, hidden_);
  add_outer(dy, h_, down, intermediate_);
  return project(d_gate_up, {.values = gate_up_weights_.data(),
                             .size = gate_up_weights_.size(),
                             .columns = hidden_,
                             .depth = 2 * intermediate_});
}

}  // namespace foremoe
