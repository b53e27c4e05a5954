#include "foremoe/runtime/cuda/cuda_check.h"
#include "foremoe/runtime/cuda/cuda_stream.h"
#include "foremoe/runtime/cuda/launch.cuh"
#include "foremoe/runtime/cuda/measure/gpu_load.h"

namespace foremoe::cuda {
namespace {

__global__ void wait_kernel(std::int64_t nanoseconds) {
  std::int64_t begin = 0, now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

void occupy_stream(Stream& stream, double seconds) {
  wait_kernel<<<1, 1, 0, dynamic_cast<CudaStream&>(stream).handle()>>>(static_cast<std::int64_t>(seconds * 1e9));
  check_launch();
}

}  // namespace foremoe::cuda
