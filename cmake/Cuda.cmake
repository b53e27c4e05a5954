# FOREMOE_CUDA: turns on the CUDA language. The folders src/foremoe/runtime/{cuda,nccl} are the only ones that use
# it. Compiling one kernel here finds a toolkit that does not fit the host compiler before anything else is built.

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "FOREMOE_CUDA is ON but no CUDA compiler was found: put nvcc on PATH, or set CUDACXX to it")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)  # A100, H100/H200
endif()
enable_language(CUDA)
string(APPEND CMAKE_CUDA_FLAGS " -std=c++20")  # CMake 3.25 does not know that nvcc has this standard
find_package(CUDAToolkit REQUIRED)

include(CheckSourceCompiles)
check_source_compiles(CUDA "
  #include <concepts>
  template <std::floating_point T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }
  int main() { scale<<<1, 1>>>(static_cast<float*>(nullptr), 2.0f); return cudaDeviceSynchronize(); }
" FOREMOE_CUDA_COMPILES)
if(NOT FOREMOE_CUDA_COMPILES)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} cannot compile C++20 with ${CMAKE_CXX_COMPILER} (CMakeFiles/CMakeError.log says why)")
endif()
message(STATUS "CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
