#include "foremoe/reference/tensor_error.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace foremoe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1.0p-24;  // unit of variances: maximum relative error of rounding to float32

}  // namespace

double relative_error(std::span<const float> x, std::span<const double> reference) {
  if (x.size() != reference.size()) return kInfinity;
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = std::abs(double{x[i]} - reference[i]);
    if (std::isnan(difference)) return kInfinity;
    error = std::max(error, difference);
    norm = std::max(norm, std::abs(reference[i]));
  }
  if (norm > 0) return error / norm;
  return error > 0 ? kInfinity : 0;
}

double deviations(std::span<const float> x, std::span<const double> reference, std::span<const double> variance) {
  if (x.size() != reference.size() || x.size() != variance.size()) return kInfinity;
  double most = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = std::abs(double{x[i]} - reference[i]);
    if (difference == 0) continue;
    const double deviation = kUnit * std::sqrt(variance[i]);
    if (!(deviation > 0)) return kInfinity;
    most = std::max(most, difference / deviation);
    if (std::isnan(difference)) return kInfinity;
  }
  return most;
}

double most_deviations(std::size_t n) {
  return 2 * std::sqrt(std::log(2 * static_cast<double>(std::max<std::size_t>(n, 1))));
}

}  // namespace foremoe
