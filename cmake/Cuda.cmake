# FOREMOE_CUDA: turns on the CUDA language and finds cuBLAS and NCCL. The folders src/foremoe/runtime/{cuda,nccl} are the
# only ones that use them. Compiling one kernel here finds a toolkit that does not fit the host compiler before anything
# else is built. Nothing here needs a GPU.

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "FOREMOE_CUDA is ON but no CUDA compiler was found: put nvcc on PATH, or set CUDACXX to it")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)  # A100, H100/H200
endif()
if(FOREMOE_CCACHE AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${FOREMOE_CCACHE})
endif()
enable_language(CUDA)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc has this standard
find_package(CUDAToolkit 12.5 REQUIRED)        # whose cuBLAS first had grouped GEMMs in float32

# nvcc has warnings of its own; those of the C++ compiler are for its language alone.
get_target_property(warnings foremoe_warnings INTERFACE_COMPILE_OPTIONS)
set_target_properties(foremoe_warnings PROPERTIES INTERFACE_COMPILE_OPTIONS
  "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>;$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${FOREMOE_WERROR}>>:-Werror=all-warnings>")

find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
if(NOT NCCL_INCLUDE_DIR OR NOT NCCL_LIBRARY)
  message(FATAL_ERROR "FOREMOE_CUDA is ON but NCCL was not found: set NCCL_INCLUDE_DIR and NCCL_LIBRARY to it")
endif()
add_library(NCCL::nccl INTERFACE IMPORTED)
target_include_directories(NCCL::nccl INTERFACE ${NCCL_INCLUDE_DIR})
target_link_libraries(NCCL::nccl INTERFACE ${NCCL_LIBRARY} CUDA::cudart)

include(CheckSourceCompiles)
set(CMAKE_REQUIRED_FLAGS -std=c++20)
check_source_compiles(CUDA "
  #include <concepts>
  template <std::floating_point T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }
  int main() { scale<<<1, 1>>>(static_cast<float*>(nullptr), 2.0f); return cudaDeviceSynchronize(); }
" FOREMOE_CUDA_COMPILES)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT FOREMOE_CUDA_COMPILES)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} cannot compile C++20 with ${CMAKE_CXX_COMPILER} (CMakeFiles/CMakeError.log says why)")
endif()
message(STATUS "CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
