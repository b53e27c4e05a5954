#pragma once

// Dense matrix products, computed by Eigen on the calling thread.

#include <cstdint>
#include <vector>

namespace foremoe::cpu {

// C = A·B, or C += A·B. All matrices are row-major and dense: C [rows][columns]; A [rows][depth], or [depth][rows] if
// transposed; B [depth][columns], or [columns][depth]. Rows and depth may be 0; a depth of 0 leaves C unchanged.
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

// Eigen selects instructions at compile time, so the product is compiled once per instruction set. multiply() uses the
// last set in this list, the widest that the processor supports. Results of different sets differ by rounding.
struct InstructionSet {
  const char* name = nullptr;
  void (*multiply_floats)(const Product&, const float*, const float*, float*) = nullptr;
  void (*multiply_doubles)(const Product&, const double*, const double*, double*) = nullptr;
};
std::vector<InstructionSet> supported_instruction_sets();

}  // namespace foremoe::cpu
