#pragma once

// Measures how fast this machine performs a rank's work: GEMMs, moving rows, exchanging rows and copying experts. All
// ranks measure at the same time, so they compete for shared resources as in a real run.
//
// Method. A measurement repeats one operation of the runtime (cpu/, Communicator, CopyLink) between barriers for at
//   least `seconds`. Rates use the mean time over all repetitions, so they include contention for processors and
//   memory. A latency is the median over repetitions, which is robust against brief disturbances. Results are averaged
//   over ranks. Rates are measured with buffers larger than the caches, latencies with a few bytes.
// Limits. Ranks are threads of this process. The network to other nodes is not measured.

#include <string>

#include "foremoe/cluster/cluster.h"
#include "foremoe/core/units.h"
#include "foremoe/runtime/cpu/experts.h"

namespace foremoe {

struct SpeedOptions {
  int num_ranks = 1;
  ExpertShape shape{.hidden = 1024, .intermediate = 512};  // of the expert in GEMM measurements
  int rows = 512;                                          // rows of that expert per call
  Bytes buffer{64 << 20};                                  // moved or copied at once, per rank
  double seconds = 0.3;                                    // minimum duration of each measurement
};

// Speed of one rank while all ranks are being measured.
struct MachineSpeed {
  double best_flops_per_second = 0;    // fastest forward of the expert
  double expert_flops_per_second = 0;  // mean over all forwards
  double moved_bytes_per_second = 0;   // bytes read and written by memcpy
  double operation_seconds = 0;        // per operation on one element
  double exchange_bytes_per_second = 0;
  double exchange_seconds = 0;         // per exchange of 64 bytes with each rank
  double copied_bytes_per_second = 0;  // by a copy link from memory shared by all ranks of the node
  double copy_seconds = 0;             // per copy of 64 bytes
};

// Throws InputError if there is too little memory. With one rank, both exchange members are 0.
MachineSpeed measure_machine(const SpeedOptions& options);

// A cluster that models this machine. A note for each number states how it was measured or what was assumed.
struct Calibration {
  Cluster cluster;
  ClusterNotes notes;  // one for each number
};

// If options.num_ranks is 0, uses one rank per processor.
Calibration calibrate(const std::string& name, SpeedOptions options);

}  // namespace foremoe
