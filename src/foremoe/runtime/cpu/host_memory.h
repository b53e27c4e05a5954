#pragma once

// Host memory for a device's tensors.

#include <optional>

#include "foremoe/runtime/device.h"

namespace foremoe::cpu {

// 64-byte aligned, zeroed and thereby really there. Throws InputError naming the bytes when there is too little.
DeviceMemory allocate_host_memory(Bytes bytes);

// What this process may still take: the least of the machine's available memory and of what the control group (version
// 2) still allows. None where the system does not say.
std::optional<Bytes> available_memory();

}  // namespace foremoe::cpu
