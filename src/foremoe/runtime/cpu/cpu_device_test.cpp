#include "foremoe/runtime/cpu/cpu_device.h"

#include "foremoe/runtime/device_conformance.h"

FOREMOE_DEVICE_CONFORMANCE(Cpu, foremoe::make_cpu_device);
