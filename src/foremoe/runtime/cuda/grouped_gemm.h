#pragma once

// Many GEMMs of different sizes in one call of cuBLAS. Float32 throughout: tensor cores in TF32 are off, whatever the
// environment says. The workspace is fixed at creation: none is allocated later, and results repeat bit for bit.

#include <cublas_v2.h>

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/runtime/cuda/staging_ring.h"

namespace foremoe::cuda {

void check(cublasStatus_t status, const char* call);

// Row-major: C [rows][columns] = A·B, of depth `depth`, plus what C held when `add`.
struct Gemm {
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t depth = 0;
  bool add = false;
};

enum class GemmForm {
  kNormal,       // A [rows][depth], B [depth][columns]
  kTransposedA,  // A [depth][rows]
  kTransposedB,  // B [columns][depth]
};

class GroupedGemm {
 public:
  GroupedGemm(cudaStream_t stream, StagingRing& ring);
  ~GroupedGemm();
  GroupedGemm(const GroupedGemm&) = delete;
  GroupedGemm& operator=(const GroupedGemm&) = delete;

  void multiply(std::span<const Gemm> gemms, GemmForm form);  // depth and sizes at least 1

 private:
  StagingRing& ring_;
  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;

  // One entry per GEMM, as cuBLAS takes them: column-major, so that C's transpose is computed, from B and A swapped.
  struct Arrays {
    std::vector<cublasOperation_t> form_a, form_b;
    std::vector<int> m, n, k, lda, ldb, ldc, group_size;
    std::vector<float> alpha, beta;
    std::vector<const float*> a, b;
    std::vector<float*> c;
    void resize(std::size_t n_gemms);
  } arrays_;
};

}  // namespace foremoe::cuda
