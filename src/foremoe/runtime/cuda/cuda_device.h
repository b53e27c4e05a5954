#pragma once

// The device of a rank that computes on a GPU: one stream, GEMMs by cuBLAS, the rest by kernels of ours. Several ranks
// may share a GPU in one process: each has a device object and a stream of its own, and sees the others' memory.
//
// The host enqueues and goes on: index arrays travel through a pinned ring, scratch is reused. It waits only where
// device.h says so (download, picks, losses), when scratch or ring must grow, and when it is a whole ring ahead.
// Results repeat bit for bit: no atomics, fixed orders of summation, one cuBLAS workspace.

#include <memory>

#include "foremoe/runtime/device.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace foremoe {

int num_cuda_devices();  // 0 also where there is no driver

// `stream` is the caller's and must outlive the device; null: a stream of the device's own. Throws InputError when
// there is no such GPU.
std::unique_ptr<Device> make_cuda_device(int gpu, CUstream_st* stream = nullptr);

}  // namespace foremoe
