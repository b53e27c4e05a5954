#pragma once

#include <cuda_runtime_api.h>

#include "foremoe/runtime/device.h"

namespace foremoe::cuda {

// Zeroed by `stream`, and done on return: any other stream may use it. Throws InputError saying how much was wanted and
// how much there is. Freeing it waits for the device.
DeviceMemory allocate_device_memory(int gpu, Bytes bytes, cudaStream_t stream);

}  // namespace foremoe::cuda
