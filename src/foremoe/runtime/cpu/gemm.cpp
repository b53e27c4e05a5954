#include "foremoe/runtime/cpu/gemm.h"

#include <cblas.h>

#include <mutex>

namespace foremoe::cpu {

void multiply(GemmSize size, const float* a, const float* b, float* c) {
  if (size.rows == 0) return;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<blasint>(size.rows), size.columns, size.depth,
              1.0F, a, size.depth, b, size.columns, 0.0F, c, size.columns);
}

void multiply_transposed(GemmSize size, const float* a, const float* b, float* c) {
  if (size.rows == 0) return;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(size.rows), size.columns, size.depth, 1.0F,
              a, size.depth, b, size.depth, 0.0F, c, size.columns);
}

void add_outer(OuterSize size, const float* a, const float* b, bool fresh, float* c) {
  if (size.summed == 0) return;
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, size.rows, size.columns, static_cast<blasint>(size.summed), 1.0F,
              a, size.rows, b, size.columns, fresh ? 0.0F : 1.0F, c, size.columns);
}

void keep_blas_on_its_callers_thread() {
  static std::once_flag once;
  std::call_once(once, [] { openblas_set_num_threads(1); });
}

}  // namespace foremoe::cpu
