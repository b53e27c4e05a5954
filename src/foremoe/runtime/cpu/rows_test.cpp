#include "foremoe/runtime/cpu/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <thread>

#include "foremoe/testing/arithmetic.h"

namespace foremoe::cpu {
namespace {

using namespace foremoe::test;

using Indices = std::vector<std::int32_t>;

struct RowsCase {
  int tokens, k, hidden, left_out;  // one of every `left_out` entries has no row
};
constexpr RowsCase kRowsCases[] = {{0, 2, 8, 9},  {1, 1, 1, 9},    {7, 1, 5, 9},   {9, 3, 20, 4},
                                   {5, 2, 64, 1}, {300, 8, 64, 5}, {33, 4, 257, 7}};

// Returns a shuffled row for every entry; −1 for entries without a row.
Indices shuffled_rows(const RowsCase& c, Random& random) {
  Indices row(static_cast<std::size_t>(c.tokens) * static_cast<std::size_t>(c.k));
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = static_cast<std::int32_t>(i);
    std::swap(row[i], row[random.below(i + 1)]);
  }
  for (std::size_t i = 0; i < row.size(); i += static_cast<std::size_t>(c.left_out)) row[i] = -1;
  return row;
}

TEST_F(Arithmetic, GatherCopiesRowsAndSkipsNegativeIndices) {
  for (const int width : {1, 3, 4, 64, 130}) {
    const auto w = static_cast<std::size_t>(width);
    const std::vector<float> from = random_values(5 * w);
    const Indices row{4, -1, 0, 4, 2};  // a row may be gathered twice
    float* to = put(5 * w, 9);
    gather_rows(to, put(from), row, width);
    std::vector<float> expected(5 * w, 9);
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] >= 0)
        std::copy_n(from.begin() + row[i] * width, width, expected.begin() + static_cast<std::ptrdiff_t>(i * w));
    }
    EXPECT_EQ(get(to, 5 * w), expected);
    gather_rows(to, to, {}, width);
  }
}

TEST_F(Arithmetic, ScatterCopiesRowsAndSkipsNegativeIndices) {
  for (const int width : {1, 3, 4, 64, 130}) {
    const auto w = static_cast<std::size_t>(width);
    const std::vector<float> from = random_values(4 * w);
    const Indices row{5, -1, 0, 3};
    float* to = put(6 * w, 9);
    scatter_rows(to, put(from), row, width);
    std::vector<float> expected(6 * w, 9);
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (row[i] >= 0)
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(i * w), width, expected.begin() + row[i] * width);
    }
    EXPECT_EQ(get(to, 6 * w), expected);
    scatter_rows(to, to, {}, width);
  }
}

TEST_F(Arithmetic, CombineAddsWeightedRows) {
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
    const TokenRows from{.rows = put(rows), .row = row, .k = c.k, .hidden = c.hidden};
    combine(y, from, put(weight));
    add_rows(to, from);
    EXPECT_LE(relative_error(get(y, before.size()), weighted), kTolerance) << c.tokens;
    EXPECT_LE(relative_error(get(to, before.size()), plain), kTolerance) << c.tokens;
  }
}

TEST_F(Arithmetic, CombineBackwardIsTheGradientOfCombine) {
  for (const RowsCase& c : kRowsCases) {
    const Indices row = shuffled_rows(c, random());
    const auto hidden = static_cast<std::size_t>(c.hidden), k = static_cast<std::size_t>(c.k);
    const std::vector<float> rows = random_values(row.size() * hidden), weight = random_values(row.size());
    const std::vector<float> dy = random_values(row.size() / k * hidden);
    float *d_rows = put(rows.size(), 3), *d_weight = put(weight.size(), 3);
    combine_backward({.rows = put(rows), .row = row, .k = c.k, .hidden = c.hidden}, put(weight), put(dy),
                     {.d_rows = d_rows, .d_weight = d_weight});

    // ⟨y, dy⟩ is bilinear in rows and weights, so the derivative with respect to one depends only on the other.
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
    EXPECT_LE(relative_error(get(d_rows, rows.size()), expected_rows), kTolerance) << c.tokens;
    EXPECT_LE(relative_error(get(d_weight, weight.size()), expected_weight), kTolerance) << c.tokens;
  }
}

// Compares with finite differences, since the test above could repeat an error of the code.
TEST_F(Arithmetic, CombineBackwardMatchesFiniteDifferences) {
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
  combine_backward({.rows = put(rows), .row = row, .k = 2, .hidden = 2}, put(weight), put(dy),
                   {.d_rows = d_rows, .d_weight = d_weight});
  const auto by_rows = slopes([&](const auto& r) { return loss(r, to_double(weight)); }, to_double(rows));
  const auto by_weight = slopes([&](const auto& w) { return loss(to_double(rows), w); }, to_double(weight));
  EXPECT_LE(relative_error(get(d_rows, 10), by_rows), kTolerance);
  EXPECT_LE(relative_error(get(d_weight, 6), by_weight), kTolerance);
}

}  // namespace
}  // namespace foremoe::cpu
