#include "foremoe/runtime/cpu/rows.h"

#include <algorithm>
#include <cstddef>

namespace foremoe::cpu {

namespace {

// Calls step(token offset, entry, row offset) for every entry that has a row, in order.
template <class Step>
void for_each_row(const TokenRows& from, const Step& step) {
  std::size_t entry = 0;
  for (std::ptrdiff_t token = 0; entry < from.row.size(); ++token) {
    for (int j = 0; j < from.k; ++j, ++entry) {
      if (from.row[entry] >= 0)
        step(token * from.hidden, entry, static_cast<std::ptrdiff_t>(from.row[entry]) * from.hidden);
    }
  }
}

}  // namespace

void gather_rows(float* to, const float* from, RowIndices row, int width) {
  for (const std::int32_t r : row) {
    if (r >= 0) std::copy_n(from + static_cast<std::ptrdiff_t>(r) * width, width, to);
    to += width;
  }
}

void scatter_rows(float* to, const float* from, RowIndices row, int width) {
  for (const std::int32_t r : row) {
    if (r >= 0) std::copy_n(from, width, to + static_cast<std::ptrdiff_t>(r) * width);
    from += width;
  }
}

void combine(float* y, const TokenRows& from, const float* weight) {
  for_each_row(from, [&](std::ptrdiff_t token, std::size_t entry, std::ptrdiff_t row) {
    const float w = weight[entry];
    for (int h = 0; h < from.hidden; ++h) y[token + h] += w * from.rows[row + h];
  });
}

void add_rows(float* to, const TokenRows& from) {
  for_each_row(from, [&](std::ptrdiff_t token, std::size_t, std::ptrdiff_t row) {
    for (int h = 0; h < from.hidden; ++h) to[token + h] += from.rows[row + h];
  });
}

void combine_backward(const TokenRows& from, const float* weight, const float* dy, CombineGradients out) {
  for_each_row(from, [&](std::ptrdiff_t token, std::size_t entry, std::ptrdiff_t row) {
    out.d_weight[entry] = static_cast<float>(dot(from.rows + row, dy + token, from.hidden));
    const float w = weight[entry];
    for (int h = 0; h < from.hidden; ++h) out.d_rows[row + h] = w * dy[token + h];
  });
}

double dot(const float* a, const float* b, int n) {
  double sum[4] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sum[lane] += double{a[i + lane]} * double{b[i + lane]};
  }
  for (; i < n; ++i) sum[0] += double{a[i]} * double{b[i]};
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace foremoe::cpu
