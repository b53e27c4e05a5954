#pragma once

// Matrix products in float32 by OpenBLAS, on the calling thread. Row-major and dense: a matrix's rows follow each
// other.

#include <cstdint>

namespace foremoe::cpu {

// [rows][columns] summed over `depth`. A size of 0 is legal for rows.
struct GemmSize {
  std::int64_t rows = 0;
  int columns = 0;
  int depth = 0;
};

void multiply(GemmSize size, const float* a, const float* b, float* c);             // C = A·B, B [depth][columns]
void multiply_transposed(GemmSize size, const float* a, const float* b, float* c);  // C = A·Bᵀ, B [columns][depth]

// C = (fresh ? 0 : C) + Aᵀ·B, A [summed][rows], B [summed][columns].
struct OuterSize {
  int rows = 0;
  int columns = 0;
  std::int64_t summed = 0;
};
void add_outer(OuterSize size, const float* a, const float* b, bool fresh, float* c);

// OpenBLAS starts no threads of its own: the ranks are the threads. Any number of calls, from any thread.
void keep_blas_on_its_callers_thread();

}  // namespace foremoe::cpu
