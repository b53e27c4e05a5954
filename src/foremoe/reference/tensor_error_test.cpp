#include "foremoe/reference/tensor_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace foremoe {
namespace {

TEST(RelativeError, IsTheLargestDifferenceOverTheLargestReference) {
  EXPECT_DOUBLE_EQ(relative_error(std::vector{1.5F, -4.0F}, std::vector{1.0, -4.0}), 0.125);
  EXPECT_EQ(relative_error(std::vector{0.0F, 0.0F}, std::vector{0.0, 0.0}), 0);
  EXPECT_EQ(relative_error({}, {}), 0);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(relative_error(std::vector{1e-30F}, std::vector{0.0}), kInfinity);
  EXPECT_EQ(relative_error(std::vector{std::nanf("")}, std::vector{1.0}), kInfinity);
  EXPECT_EQ(relative_error(std::vector{1.0F}, std::vector{1.0, 0.0}), kInfinity);
}

}  // namespace
}  // namespace foremoe
