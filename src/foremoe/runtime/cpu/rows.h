#pragma once

// Rows moved and summed: between tokens, the ranks that compute them and their experts.

#include <cstdint>
#include <span>

namespace foremoe::cpu {

using RowIndices = std::span<const std::int32_t>;

// to[i] = from[row[i]], rows of `width`; row[i] < 0 leaves to[i] as it is.
void gather_rows(float* to, const float* from, RowIndices row, int width);
// to[row[i]] = from[i]; the rows are distinct; row[i] < 0 is left out.
void scatter_rows(float* to, const float* from, RowIndices row, int width);

// [token][k] rows of `hidden` each.
struct TokenRows {
  const float* rows = nullptr;
  RowIndices row;  // [token·k + j]
  int k = 1;
  int hidden = 0;
};
// y[t] += Σ_j weight[t·k + j] · rows[row[t·k + j]], j ascending; row < 0 adds nothing. y [tokens][hidden].
void combine(float* y, const TokenRows& from, const float* weight);
// to[t] += Σ_j rows[row[t·k + j]], j ascending: gradients of a token that was sent to k experts.
void add_rows(float* to, const TokenRows& from);

struct CombineGradients {
  float* d_rows = nullptr;
  float* d_weight = nullptr;
};
// d_rows[row[i]] = weight[i]·dy[t] and d_weight[i] = ⟨rows[row[i]], dy[t]⟩, in double; where row < 0 d_weight[i] stays
// as it is.
void combine_backward(const TokenRows& from, const float* weight, const float* dy, CombineGradients out);

// Σ a[i]·b[i] in double, always in the same order.
double dot(const float* a, const float* b, int n);

}  // namespace foremoe::cpu
