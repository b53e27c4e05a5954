#include "foremoe/runtime/reference_expert.h"

#include <cblas.h>

#include <cmath>
#include <utility>

namespace foremoe {

namespace {

// C = A·B + keep·C, row-major; `m`, `n`, `k` as BLAS has them.
struct Product {
  std::size_t m = 0, n = 0, k = 0;
  CBLAS_TRANSPOSE a = CblasNoTrans, b = CblasNoTrans;
  double keep = 0;
};

void multiply(const Product& p, const double* a, const double* b, double* c) {
  if (p.m == 0 || p.n == 0 || p.k == 0) return;
  const auto size = [](std::size_t n) { return static_cast<blasint>(n); };
  cblas_dgemm(CblasRowMajor, p.a, p.b, size(p.m), size(p.n), size(p.k), 1.0, a, size(p.a == CblasTrans ? p.m : p.k), b,
              size(p.b == CblasTrans ? p.k : p.n), p.keep, c, size(p.n));
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

std::size_t ReferenceExpert::down_offset() const {
  return std::size_t{2} * static_cast<std::size_t>(shape_.intermediate) * static_cast<std::size_t>(shape_.hidden);
}

std::vector<double> ReferenceExpert::forward(std::vector<double> x) {
  const auto hidden = static_cast<std::size_t>(shape_.hidden),
             intermediate = static_cast<std::size_t>(shape_.intermediate);
  x_ = std::move(x);
  const std::size_t rows = x_.size() / hidden;
  gate_up_.resize(rows * 2 * intermediate);
  h_.resize(rows * intermediate);
  multiply({.m = rows, .n = 2 * intermediate, .k = hidden, .b = CblasTrans}, x_.data(), gate_up(), gate_up_.data());
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t i = 0; i < intermediate; ++i) {
      const double g = gate_up_[row * 2 * intermediate + i], u = gate_up_[(row * 2 + 1) * intermediate + i];
      h_[row * intermediate + i] = g * sigmoid(g) * u;
    }
  }
  std::vector<double> y(rows * hidden);
  multiply({.m = rows, .n = hidden, .k = intermediate, .b = CblasTrans}, h_.data(), down(), y.data());
  return y;
}

std::vector<double> ReferenceExpert::backward(std::span<const double> dy, std::span<double> gradient) const {
  const auto hidden = static_cast<std::size_t>(shape_.hidden),
             intermediate = static_cast<std::size_t>(shape_.intermediate);
  const std::size_t rows = x_.size() / hidden;
  std::vector<double> dh(rows * intermediate), d_gate_up(gate_up_.size()), dx(x_.size());
  multiply({.m = rows, .n = intermediate, .k = hidden}, dy.data(), down(), dh.data());
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t i = 0; i < intermediate; ++i) {
      const std::size_t at_g = row * 2 * intermediate + i, at_u = at_g + intermediate;
      const double g = gate_up_[at_g], u = gate_up_[at_u], d = dh[row * intermediate + i], s = sigmoid(g);
      d_gate_up[at_g] = d * u * (s + g * s * (1 - s));
      d_gate_up[at_u] = d * g * s;
    }
  }
  multiply({.m = 2 * intermediate, .n = hidden, .k = rows, .a = CblasTrans, .keep = 1}, d_gate_up.data(), x_.data(),
           gradient.data());
  multiply({.m = hidden, .n = intermediate, .k = rows, .a = CblasTrans, .keep = 1}, dy.data(), h_.data(),
           gradient.data() + down_offset());
  multiply({.m = rows, .n = hidden, .k = 2 * intermediate}, d_gate_up.data(), gate_up(), dx.data());
  return dx;
}

}  // namespace foremoe
