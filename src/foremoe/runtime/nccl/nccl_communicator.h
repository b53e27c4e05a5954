#pragma once

// Ranks with a GPU each: device memory travels by NCCL, ordered by the rank's stream and without the host waiting; what
// is in host memory, and votes, go through another communicator of the same ranks (MPI between processes, threads in
// one). Between processes of a node, device memory is mapped by CUDA IPC.
//
// A sum is taken slice by slice, in rank order, as among threads: rank r adds the r-th part of everybody's values, and
// all get it. An all-to-all is one group of sends and receives. NCCL wants one rank per GPU: with fewer GPUs, ranks are
// threads, with a threads communicator over their GPU's memory.

#include <chrono>
#include <memory>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/device.h"

namespace foremoe {

struct NcclOptions {
  int gpu = 0;  // that `device` was made for
  std::chrono::milliseconds timeout{60'000};
};

// Collective. `host`'s own device is not used: it may be the CPU's. `device` must outlive the communicator. Throws
// InputError when the device is no GPU or two ranks have the same one.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host, Device& device,
                                                     const NcclOptions& options);

}  // namespace foremoe
