#include "foremoe/runtime/cpu/multiply.h"

namespace foremoe::cpu {

// multiply_eigen.inc defines these functions. Each instruction set has its own source: multiply_baseline.cpp, …
namespace baseline {
void multiply(const Product& product, const float* a, const float* b, float* c);
void multiply(const Product& product, const double* a, const double* b, double* c);
}  // namespace baseline
namespace avx2 {
void multiply(const Product& product, const float* a, const float* b, float* c);
void multiply(const Product& product, const double* a, const double* b, double* c);
}  // namespace avx2
namespace avx512 {
void multiply(const Product& product, const float* a, const float* b, float* c);
void multiply(const Product& product, const double* a, const double* b, double* c);
}  // namespace avx512

std::vector<InstructionSet> supported_instruction_sets() {
  std::vector<InstructionSet> sets{{"baseline", baseline::multiply, baseline::multiply}};
#ifdef __x86_64__
  // These features match the compiler flags in CMakeLists.txt. The builtin also checks that the operating system saves
  // the wide registers.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return sets;
  sets.push_back({"avx2", avx2::multiply, avx2::multiply});
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq")) return sets;
  sets.push_back({"avx512", avx512::multiply, avx512::multiply});
#endif
  return sets;
}

namespace {

const InstructionSet& fastest() {
  static const InstructionSet set = supported_instruction_sets().back();
  return set;
}

}  // namespace

void multiply(const Product& product, const float* a, const float* b, float* c) {
  fastest().multiply_floats(product, a, b, c);
}

void multiply(const Product& product, const double* a, const double* b, double* c) {
  fastest().multiply_doubles(product, a, b, c);
}

}  // namespace foremoe::cpu
