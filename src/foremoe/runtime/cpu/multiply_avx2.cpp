#ifdef __x86_64__
#ifndef __FMA__
#error "compile this source with the flags in runtime/CMakeLists.txt"
#endif
#define INSTRUCTION_SET avx2
#define Eigen Eigen_avx2
#include "foremoe/runtime/cpu/multiply_eigen.inc"
#endif
