#include "foremoe/runtime/cuda/grouped_gemm.h"

#include <fmt/format.h>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what cuBLAS recommends for Hopper

}  // namespace

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw CudaError(fmt::format("{}: {}", call, cublasGetStatusString(status)));
}

GroupedGemm::GroupedGemm(cudaStream_t stream, StagingRing& ring) : ring_(ring) {
  FOREMOE_CUDA(cublasCreate(&handle_));
  try {
    FOREMOE_CUDA(cublasSetStream(handle_, stream));
    FOREMOE_CUDA(cudaMalloc(&workspace_, kWorkspaceBytes));
    FOREMOE_CUDA(cublasSetWorkspace(handle_, workspace_, kWorkspaceBytes));  // after the stream, which resets it
    FOREMOE_CUDA(cublasSetMathMode(handle_, CUBLAS_PEDANTIC_MATH));
    FOREMOE_CUDA(cublasSetAtomicsMode(handle_, CUBLAS_ATOMICS_NOT_ALLOWED));
  } catch (...) {
    FOREMOE_CUDA_NOTHROW(cublasDestroy(handle_));
    FOREMOE_CUDA_NOTHROW(cudaFree(workspace_));
    throw;
  }
}

GroupedGemm::~GroupedGemm() {
  FOREMOE_CUDA_NOTHROW(cublasDestroy(handle_));
  FOREMOE_CUDA_NOTHROW(cudaFree(workspace_));
}

void GroupedGemm::Arrays::resize(std::size_t n_gemms) {
  form_a.resize(n_gemms);
  form_b.resize(n_gemms);
  for (std::vector<int>* sizes : {&m, &n, &k, &lda, &ldb, &ldc}) sizes->resize(n_gemms);
  group_size.assign(n_gemms, 1);
  alpha.assign(n_gemms, 1.0F);
  beta.resize(n_gemms);
  a.resize(n_gemms);
  b.resize(n_gemms);
  c.resize(n_gemms);
}

void GroupedGemm::multiply(std::span<const Gemm> gemms, GemmForm form) {
  if (gemms.empty()) return;
  Arrays& of = arrays_;
  of.resize(gemms.size());
  for (std::size_t i = 0; i < gemms.size(); ++i) {
    const Gemm& gemm = gemms[i];
    of.form_a[i] = form == GemmForm::kTransposedB ? CUBLAS_OP_T : CUBLAS_OP_N;
    of.form_b[i] = form == GemmForm::kTransposedA ? CUBLAS_OP_T : CUBLAS_OP_N;
    of.m[i] = static_cast<int>(gemm.columns);
    of.n[i] = static_cast<int>(gemm.rows);
    of.k[i] = static_cast<int>(gemm.depth);
    of.lda[i] = static_cast<int>(form == GemmForm::kTransposedB ? gemm.depth : gemm.columns);
    of.ldb[i] = static_cast<int>(form == GemmForm::kTransposedA ? gemm.rows : gemm.depth);
    of.ldc[i] = static_cast<int>(gemm.columns);
    of.beta[i] = gemm.add ? 1.0F : 0.0F;
    of.a[i] = gemm.b;
    of.b[i] = gemm.a;
    of.c[i] = gemm.c;
  }
  const float* const* a = ring_.stage(std::span<const float* const>(of.a));
  const float* const* b = ring_.stage(std::span<const float* const>(of.b));
  float* const* c = ring_.stage(std::span<float* const>(of.c));
  FOREMOE_CUDA(cublasSgemmGroupedBatched(handle_, of.form_a.data(), of.form_b.data(), of.m.data(), of.n.data(),
                                         of.k.data(), of.alpha.data(), a, of.lda.data(), b, of.ldb.data(),
                                         of.beta.data(), c, of.ldc.data(), static_cast<int>(gemms.size()),
                                         of.group_size.data()));
}

}  // namespace foremoe::cuda
