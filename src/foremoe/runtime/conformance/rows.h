#pragma once

// Conformance of the operations that move and sum rows.

#include <algorithm>
#include <cmath>

#include "foremoe/runtime/conformance/device_fixture.h"

namespace foremoe {

using Indices = std::vector<std::int32_t>;

struct RowsCase {
  int tokens, k, hidden, left_out;  // of every `left_out` entries one has no row
};
inline constexpr RowsCase kRowsCases[] = {{0, 2, 8, 9},  {1, 1, 1, 9},    {7, 1, 5, 9},   {9, 3, 20, 4},
                                          {5, 2, 64, 1}, {300, 8, 64, 5}, {33, 4, 257, 7}};

// Every entry's row, shuffled; −1 for those left out.
inline Indices shuffled_rows(const RowsCase& c, Random& random) {
  Indices row(static_cast<std::size_t>(c.tokens) * static_cast<std::size_t>(c.k));
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = static_cast<std::int32_t>(i);
    std::swap(row[i], row[random.below(i + 1)]);
  }
  for (std::size_t i = 0; i < row.size(); i += static_cast<std::size_t>(c.left_out)) row[i] = -1;
  return row;
}

TEST_P(DeviceConformance, GatherTakesRowsAndLeavesThoseWithout) {
  for (const int width : {1, 3, 4, 64, 130}) {
    const auto w = static_cast<std::size_t>(width);
    const std::vector<float> from = random_values(5 * w);
    const Indices row{4, -1, 0, 4, 2};  // a row may be taken twice
    float* to = put(5 * w, 9);
    device().gather_rows(to, put(from), row, width);
    std::vector<float> expected(5 * w, 9);
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] >= 0)
        std::copy_n(from.begin() + row[i] * width, width, expected.begin() + static_cast<std::ptrdiff_t>(i * w));
    }
    EXPECT_EQ(get(to, 5 * w), expected);
    device().gather_rows(to, to, {}, width);
  }
}

TEST_P(DeviceConformance, ScatterPutsRowsAndLeavesOutThoseWithout) {
  for (const int width : {1, 3, 4, 64, 130}) {
    const auto w = static_cast<std::size_t>(width);
    const std::vector<float> from = random_values(4 * w);
    const Indices row{5, -1, 0, 3};
    float* to = put(6 * w, 9);
    device().scatter_rows(to, put(from), row, width);
    std::vector<float> expected(6 * w, 9);
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] >= 0)
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(i * w), width, expected.begin() + row[i] * width);
    }
    EXPECT_EQ(get(to, 6 * w), expected);
    device().scatter_rows(to, to, {}, width);
  }
}

// Indices are the caller's again when the call returns, whenever the device comes to it.
TEST_P(DeviceConformance, IndicesMayChangeAfterTheCall) {
  const std::vector<float> from = random_values(200'000);
  const float* there = put(from);
  float* to = put(from.size(), 0);
  Indices row(from.size() / 10);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<std::int32_t>(row.size() - 1 - i);
  for (int again = 0; again < 20; ++again) device().gather_rows(to, there, row, 10);
  row.assign(row.size(), 0);
  const std::vector<float> result = get(to, from.size());
  for (std::size_t i = 0; i < from.size(); ++i) ASSERT_EQ(result[i], from[from.size() - 10 - i / 10 * 10 + i % 10]);
}

TEST_P(DeviceConformance, CombineAddsWeightedRows) {
  for (const RowsCase& c : kRowsCases) {
    const Indices row = shuffled_rows(c, random());
    const auto hidden = static_cast<std::size_t>(c.hidden), k = static_cast<std::size_t>(c.k);
    const std::vector<float> rows = random_values(row.size() * hidden), weight = random_values(row.size());
    const std::vector<float> before = random_values(row.size() / k * hidden);
    std::vector<double> weighted = to_double(before), plain = weighted;
    for (std::size_t i = 0; i < row.size(); ++i) {
      for (std::size_t h = 0; row[i] >= 0 && h < hidden; ++h) {
        const double value = rows[static_cast<std::size_t>(row[i]) * hidden + h];
        weighted[i / k * hidden + h] += double{weight[i]} * value;
        plain[i / k * hidden + h] += value;
      }
    }
    float *y = put(before), *to = put(before);
    const float* there = put(rows);
    device().combine(y, there, put(weight), row, c.k, c.hidden);
    device().add_rows(to, there, row, c.k, c.hidden);
    EXPECT_LE(relative_error(get(y, before.size()), weighted), kDeviceTolerance) << c.tokens;
    EXPECT_LE(relative_error(get(to, before.size()), plain), kDeviceTolerance) << c.tokens;
  }
}

TEST_P(DeviceConformance, CombineBackwardIsTheSlopeOfCombine) {
  for (const RowsCase& c : kRowsCases) {
    const Indices row = shuffled_rows(c, random());
    const auto hidden = static_cast<std::size_t>(c.hidden), k = static_cast<std::size_t>(c.k);
    const std::vector<float> rows = random_values(row.size() * hidden), weight = random_values(row.size());
    const std::vector<float> dy = random_values(row.size() / k * hidden);
    float *d_rows = put(rows.size(), 3), *d_weight = put(weight.size(), 3);
    device().combine_backward(d_rows, d_weight, put(dy), put(rows), put(weight), row, c.k, c.hidden);

    // ⟨y, dy⟩ is linear in rows and in weights: its slope by one of them is the other's share.
    std::vector<double> expected_rows(rows.size(), 3), expected_weight(weight.size(), 3);
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] < 0) continue;
      expected_weight[i] = 0;
      for (std::size_t h = 0; h < hidden; ++h) {
        const std::size_t at = static_cast<std::size_t>(row[i]) * hidden + h;
        expected_rows[at] = double{weight[i]} * dy[i / k * hidden + h];
        expected_weight[i] += double{rows[at]} * dy[i / k * hidden + h];
      }
    }
    EXPECT_LE(relative_error(get(d_rows, rows.size()), expected_rows), kDeviceTolerance) << c.tokens;
    EXPECT_LE(relative_error(get(d_weight, weight.size()), expected_weight), kDeviceTolerance) << c.tokens;
  }
}

// Against differences of the sum itself: the test above could be wrong in the same way as the code.
TEST_P(DeviceConformance, CombineBackwardAgreesWithDifferences) {
  const Indices row{2, 0, 3, -1, 1, 4};  // [token][k] = [3][2], hidden 2
  const std::vector<float> rows = random_values(10), weight = random_values(6), dy = random_values(6);
  const auto loss = [&](const std::vector<double>& r, const std::vector<double>& w) {
    double sum = 0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      for (std::size_t h = 0; row[i] >= 0 && h < 2; ++h)
        sum += w[i] * r[static_cast<std::size_t>(row[i]) * 2 + h] * dy[i / 2 * 2 + h];
    }
    return sum;
  };
  float *d_rows = put(10, 0), *d_weight = put(6, 0);
  device().combine_backward(d_rows, d_weight, put(dy), put(rows), put(weight), row, 2, 2);
  const auto by_rows = slopes([&](const auto& r) { return loss(r, to_double(weight)); }, to_double(rows));
  const auto by_weight = slopes([&](const auto& w) { return loss(to_double(rows), w); }, to_double(weight));
  EXPECT_LE(relative_error(get(d_rows, 10), by_rows), kDeviceTolerance);
  EXPECT_LE(relative_error(get(d_weight, 6), by_weight), kDeviceTolerance);
}

}  // namespace foremoe
