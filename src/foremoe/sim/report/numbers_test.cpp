#include "foremoe/sim/report/numbers.h"

#include <gtest/gtest.h>

namespace foremoe::report {
namespace {

TEST(Numbers, SecondsHaveThreeDigitsAndTheUnitThatFits) {
  EXPECT_EQ(seconds_text(0), "0\u00A0s");
  EXPECT_EQ(seconds_text(12.345), "12.3\u00A0s");
  EXPECT_EQ(seconds_text(1234.5), "1234\u00A0s");
  EXPECT_EQ(seconds_text(0.0034), "3.40\u00A0ms");
  EXPECT_EQ(seconds_text(78e-6), "78.0\u00A0µs");
  EXPECT_EQ(seconds_text(0.99999), "1.00\u00A0s") << "not 1000 ms";
  EXPECT_EQ(seconds_text(9.9999), "10.0\u00A0s");
}

TEST(Numbers, BytesAreInPowersOfAThousand) {
  EXPECT_EQ(bytes_text(0), "0\u00A0B");
  EXPECT_EQ(bytes_text(999), "999\u00A0B");
  EXPECT_EQ(bytes_text(999.9), "1.00\u00A0kB");
  EXPECT_EQ(bytes_text(2.7e9), "2.70\u00A0GB");
  EXPECT_EQ(bytes_text(4e18), "4000\u00A0PB");
}

TEST(Numbers, RatiosKeepWhatDistinguishesGoodPolicies) {
  EXPECT_EQ(ratio_text(1.0024), "1.002");
  EXPECT_EQ(ratio_text(12.34), "12.3");
  EXPECT_EQ(times_text(1.4237), "1.42×");
  EXPECT_EQ(times_text(312), "312×");
  EXPECT_EQ(percent_text(0.9913), "99.1\u00A0%");
}

TEST(Numbers, CountsHaveCommas) {
  EXPECT_EQ(counted_text(7), "7");
  EXPECT_EQ(counted_text(999), "999");
  EXPECT_EQ(counted_text(1000), "1,000");
  EXPECT_EQ(counted_text(1234567), "1,234,567");
  EXPECT_EQ(counted_text(-123456), "-123,456");
}

TEST(Numbers, TicksAreAsShortAsExact) {
  EXPECT_EQ(tick_text(0.1 + 0.2), "0.3");
  EXPECT_EQ(tick_text(20), "20");
  EXPECT_EQ(tick_text(-0.0), "0");
}

}  // namespace
}  // namespace foremoe::report
