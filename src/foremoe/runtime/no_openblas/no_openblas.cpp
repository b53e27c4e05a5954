#include "foremoe/core/error.h"
#include "foremoe/runtime/cpu/blas.h"

namespace foremoe::cpu {
namespace {

[[noreturn]] void refuse() {
  throw InputError({.file = "OpenBLAS"}, "this program was built without OpenBLAS: install it and build again");
}

}  // namespace

bool blas_is_built() { return false; }

void reserve_blas(int) { refuse(); }

BlasThread::BlasThread() { refuse(); }
BlasThread::~BlasThread() = default;

void multiply(const Product&, const float*, const float*, float*) { refuse(); }
void multiply(const Product&, const double*, const double*, double*) { refuse(); }

}  // namespace foremoe::cpu
