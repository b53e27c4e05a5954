#pragma once

// From values to places: what an axis of a plot does.

#include <string>
#include <vector>

namespace foremoe::report {

struct Interval {
  double begin = 0;
  double end = 0;

  double length() const { return end - begin; }
};

// Where a value stands on an axis: linear, or by the logarithm. Values outside of the domain are moved to its border,
// so that nothing is ever drawn outside of a plot; a domain of one value maps to the middle.
class Scale {
 public:
  enum class Kind { kLinear, kLogarithmic };

  Scale(Interval domain, Interval range, Kind kind = Kind::kLinear);

  double operator()(double value) const;
  const Interval& domain() const { return domain_; }
  const Interval& range() const { return range_; }

 private:
  double position(double value) const;  // linear in what the axis shows

  Interval domain_;
  Interval range_;
  Kind kind_;
};

// Round values inside the domain, ascending, at most `most` (≥ 2) of them, a step of 1, 2 or 5 times a power of ten
// apart.
std::vector<double> ticks(Interval domain, int most);

// For a logarithmic axis, 0 < domain.begin: 1, 2 and 5 times powers of ten, or powers alone; round values as above
// where fewer than three of those lie inside.
std::vector<double> logarithmic_ticks(Interval domain, int most);

// From `least`, or the smallest of its ticks below, to the first tick that is not below `most`.
Interval rounded(Interval values, int most_ticks);

}  // namespace foremoe::report
