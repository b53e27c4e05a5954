#include "foremoe/runtime/cuda/device_allocation.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::cuda {

DeviceMemory allocate_device_memory(int gpu, Bytes bytes, cudaStream_t stream) {
  const CurrentDevice here(gpu);
  const Where where{.file = {}, .field = "device memory", .index = {}};
  if (bytes.value < 0) throw InputError(where, fmt::format("cannot have {} bytes", bytes.value));
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes.value, 64));
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, size);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t available = 0, total = 0;
    FOREMOE_CUDA(cudaMemGetInfo(&available, &total));
    throw InputError(where, fmt::format("cannot have {} bytes: {} are available", bytes.value, available));
  }
  FOREMOE_CUDA(status);
  std::shared_ptr<void> owner(data, [](void* p) { FOREMOE_CUDA_NOTHROW(cudaFree(p)); });
  FOREMOE_CUDA(cudaMemsetAsync(data, 0, size, stream));
  wait_for(stream);
  return {static_cast<std::byte*>(data), bytes, std::move(owner)};
}

}  // namespace foremoe::cuda
