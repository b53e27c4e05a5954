#pragma once

// How far a tensor that was computed in float32 is from its reference in float64.

#include <cstddef>
#include <span>

namespace foremoe {

// ‖x − reference‖∞ ÷ ‖reference‖∞; where the reference is 0 everywhere: 0 if x is, else infinity. Infinity also when
// the sizes differ or x holds what is not a number.
double relative_error(std::span<const float> x, std::span<const double> reference);

// The greatest |x − reference| ÷ standard deviation of its rounding. Where nothing can have been rounded: 0 if x is the
// reference, else infinity. Infinity also as above.
double deviations(std::span<const float> x, std::span<const double> reference, std::span<const double> variance);

// What deviations() is below for n right values: a Gaussian exceeds it anywhere among them with a probability below
// 1 ÷ n, and no rounding is as wild as that, its greatest error counting as the standard deviation.
double most_deviations(std::size_t n);

}  // namespace foremoe
