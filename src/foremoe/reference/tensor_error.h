#pragma once

// Error of a float32 tensor relative to its float64 reference.

#include <cstddef>
#include <span>

namespace foremoe {

// ‖x − reference‖∞ ÷ ‖reference‖∞. If the reference is all zeros, returns 0 if x is all zeros, otherwise infinity.
// Returns infinity if sizes differ or x contains NaN.
double relative_error(std::span<const float> x, std::span<const double> reference);

// Maximum over elements of |x − reference| ÷ standard deviation of its rounding error. An element with deviation 0
// counts as 0 if x equals the reference, else as infinity. Returns infinity if sizes differ or x contains NaN.
double deviations(std::span<const float> x, std::span<const double> reference, std::span<const double> variance);

// Upper bound on deviations() for n correct values. Any of n Gaussian values exceeds this bound with probability < 1 ÷
// n. Rounding errors are smaller, since the standard deviation assumes the maximum error of each rounding.
double most_deviations(std::size_t n);

}  // namespace foremoe
