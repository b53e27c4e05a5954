#ifdef __x86_64__
#ifndef __AVX512DQ__
#error "compile this source with the flags in runtime/CMakeLists.txt"
#endif
#define INSTRUCTION_SET avx512
#define Eigen Eigen_avx512
#include "foremoe/runtime/cpu/multiply_eigen.inc"
#endif
