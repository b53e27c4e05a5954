#pragma once

// Rows moved and summed: what device.h says of gather_rows, scatter_rows, combine, combine_backward and add_rows.

#include <cstdint>
#include <span>

namespace foremoe::cpu {

using RowIndices = std::span<const std::int32_t>;

void gather_rows(float* to, const float* from, RowIndices row, int width);
void scatter_rows(float* to, const float* from, RowIndices row, int width);

// [token][k] rows of `hidden` each.
struct TokenRows {
  const float* rows = nullptr;
  RowIndices row;  // [token·k + j]
  int k = 1;
  int hidden = 0;
};
void combine(float* y, const TokenRows& from, const float* weight);
void add_rows(float* to, const TokenRows& from);

struct CombineGradients {
  float* d_rows = nullptr;
  float* d_weight = nullptr;
};
void combine_backward(const TokenRows& from, const float* weight, const float* dy, CombineGradients out);

// Σ a[i]·b[i] in double, always in the same order.
double dot(const float* a, const float* b, int n);

}  // namespace foremoe::cpu
