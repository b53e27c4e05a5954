#define INSTRUCTION_SET baseline
#define Eigen Eigen_baseline
#include "foremoe/runtime/cpu/multiply_eigen.inc"
