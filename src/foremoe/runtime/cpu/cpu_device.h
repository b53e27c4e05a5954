#pragma once

// The device of a rank that computes on its own processor: GEMMs by OpenBLAS, one thread per rank, the rest in plain
// loops. Every operation is done when its call returns. The same operands give the same bits in every run, wherever
// in memory they lie.

#include <memory>

#include "foremoe/runtime/device.h"

namespace foremoe {

std::unique_ptr<Device> make_cpu_device();

}  // namespace foremoe
