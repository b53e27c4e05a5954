#pragma once

// Moves rows between tokens, the ranks that compute them and their experts, and sums rows.

#include <cstdint>
#include <span>

namespace foremoe::cpu {

using RowIndices = std::span<const std::int32_t>;

// to[i] = from[row[i]], rows of `width`; row[i] < 0 leaves to[i] unchanged.
void gather_rows(float* to, const float* from, RowIndices row, int width);
// to[row[i]] = from[i]; nonnegative rows are distinct; row[i] < 0 skips row i.
void scatter_rows(float* to, const float* from, RowIndices row, int width);

// Indices [token][k] into rows of `hidden` values.
struct TokenRows {
  const float* rows = nullptr;
  RowIndices row;  // [token·k + j]
  int k = 1;
  int hidden = 0;
};
// y[t] += Σ_j weight[t·k + j] · rows[row[t·k + j]], j ascending; row < 0 adds nothing. y [tokens][hidden].
void combine(float* y, const TokenRows& from, const float* weight);
// to[t] += Σ_j rows[row[t·k + j]], j ascending: sums the gradients of a token that was sent to k experts.
void add_rows(float* to, const TokenRows& from);

struct CombineGradients {
  float* d_rows = nullptr;
  float* d_weight = nullptr;
};
// d_rows[row[i]] = weight[i]·dy[t] and d_weight[i] = ⟨rows[row[i]], dy[t]⟩, summed in double; row < 0 leaves
// d_weight[i] unchanged.
void combine_backward(const TokenRows& from, const float* weight, const float* dy, CombineGradients out);

// Returns Σ a[i]·b[i], summed in double in a fixed order.
double dot(const float* a, const float* b, int n);

}  // namespace foremoe::cpu
