#include "foremoe/sim/report/scale.h"

#include <algorithm>
#include <cmath>

namespace foremoe::report {
namespace {

// The least of 1, 2, 5 times a power of ten that is not below `length`.
double round_step(double length) {
  const double power = std::pow(10.0, std::floor(std::log10(length)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= length * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

bool is_plottable(Interval domain) {
  return std::isfinite(domain.begin) && std::isfinite(domain.end) && domain.length() > 0;
}

std::vector<double> multiples_of(double step, Interval domain) {
  std::vector<double> out;
  const double first = std::ceil(domain.begin / step - 1e-9) + 0.0;  // no negative zero
  for (double i = first; i * step <= domain.end + 1e-9 * step; ++i) out.push_back(i * step);
  return out;
}

}  // namespace

Scale::Scale(Interval domain, Interval range, Kind kind) : domain_(domain), range_(range), kind_(kind) {}

double Scale::position(double value) const { return kind_ == Kind::kLogarithmic ? std::log(value) : value; }

double Scale::operator()(double value) const {
  if (!is_plottable(domain_) || std::isnan(value)) return range_.begin + range_.length() / 2;
  const double inside = std::clamp(value, domain_.begin, domain_.end);
  const double begin = position(domain_.begin);
  return range_.begin + range_.length() * (position(inside) - begin) / (position(domain_.end) - begin);
}

std::vector<double> ticks(Interval domain, int most) {
  if (!is_plottable(domain)) return {domain.begin};
  double step = round_step(domain.length() / std::max(1, most));
  std::vector<double> out = multiples_of(step, domain);
  while (static_cast<int>(out.size()) > most) {
    step = round_step(step * 1.5);
    out = multiples_of(step, domain);
  }
  return out;
}

std::vector<double> logarithmic_ticks(Interval domain, int most) {
  if (!is_plottable(domain) || domain.begin <= 0) return ticks(domain, most);
  for (const bool powers_alone : {false, true}) {
    std::vector<double> out;
    const int last = static_cast<int>(std::floor(std::log10(domain.end)));
    for (int exponent = static_cast<int>(std::floor(std::log10(domain.begin))); exponent <= last; ++exponent) {
      const double power = std::pow(10.0, exponent);
      for (const double factor : {1.0, 2.0, 5.0}) {
        const double value = factor * power;
        const bool inside = value >= domain.begin * (1 - 1e-9) && value <= domain.end * (1 + 1e-9);
        if (inside && (factor == 1.0 || !powers_alone)) out.push_back(value);
      }
    }
    if (out.size() >= 3 && static_cast<int>(out.size()) <= most) return out;
  }
  return ticks(domain, most);
}

Interval rounded(Interval values, int most_ticks) {
  if (!is_plottable(values)) return {.begin = values.begin, .end = values.begin + 1};
  const double step = round_step(values.length() / std::max(1, most_ticks - 1));
  return {.begin = std::floor(values.begin / step + 1e-9) * step, .end = std::ceil(values.end / step - 1e-9) * step};
}

}  // namespace foremoe::report
