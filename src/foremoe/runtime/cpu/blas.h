#pragma once

// Matrix products by OpenBLAS, each on its caller's thread. Whether this build has OpenBLAS is CMake's choice
// (openblas/ or no_openblas/, linked as foremoe::blas).

#include <cstdint>

namespace foremoe::cpu {

bool blas_is_built();

// Has OpenBLAS map its buffers for so many threads that multiply at the same time. Throws InputError when this build
// has no OpenBLAS or its library is not installed, and std::system_error when the address space has no room for them:
// OpenBLAS would wait for that room without end. Call it before the threads start: what another thread maps meanwhile
// can take the room that was found. More threads than OpenBLAS was built for share its buffers: their products wait.
void reserve_blas(int threads);

// Every thread that multiplies holds one while it does. Throws as reserve_blas(), which it calls when more multiply
// than ever before.
class BlasThread {
 public:
  BlasThread();
  ~BlasThread();
  BlasThread(const BlasThread&) = delete;
  BlasThread& operator=(const BlasThread&) = delete;
};

// C = A·B, or C += A·B. Row-major and dense: C [rows][columns]; A [rows][depth], transposed [depth][rows];
// B [depth][columns], transposed [columns][depth]. Rows and depth may be 0; a depth of 0 leaves C as it is.
struct Product {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t depth = 0;
  bool transpose_a = false;
  bool transpose_b = false;
  bool add = false;
};
void multiply(const Product& product, const float* a, const float* b, float* c);
void multiply(const Product& product, const double* a, const double* b, double* c);

}  // namespace foremoe::cpu
