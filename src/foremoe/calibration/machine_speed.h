#pragma once

// How fast the machine that this runs on is at what a rank does: products, moving rows, exchanging them, copying
// experts. All ranks measure at once, as they work at once, so that each has its share of what they share.
//
// Method. A measure repeats one operation of the runtime's own (cpu/, Communicator, CopyLink) between barriers for at
//   least so many seconds. A rate is of all repetitions together, so that a rank's share of a processor or a memory is
//   in it; a latency is the median repetition, which a passing disturbance does not move. Ranks are averaged. Rates are
//   of amounts too large for caches, latencies of a few bytes.
// Limits. Ranks are threads of this process. Another node's network is not measured, for there is none.

#include <string>

#include "foremoe/cluster/cluster.h"
#include "foremoe/core/units.h"
#include "foremoe/runtime/cpu/experts.h"

namespace foremoe {

struct SpeedOptions {
  int num_ranks = 1;
  ExpertShape shape{.hidden = 1024, .intermediate = 512};  // of the expert that products are measured with
  int rows = 512;                                          // of that expert in one call
  Bytes buffer{64 << 20};                                  // that is moved or copied at once, per rank
  double seconds = 0.3;                                    // that each measure repeats for, at least
};

// Of one rank while all ranks do the same.
struct MachineSpeed {
  double best_flops_per_second = 0;    // of the fastest forward of the expert
  double expert_flops_per_second = 0;  // of all
  double moved_bytes_per_second = 0;   // read and written by copies within memory
  double operation_seconds = 0;        // of an operation on one element
  double exchange_bytes_per_second = 0;
  double exchange_seconds = 0;         // of an exchange of 64 bytes with each rank
  double copied_bytes_per_second = 0;  // by a copy link from memory that all ranks of the node share
  double copy_seconds = 0;             // of a copy of 64 bytes
};

// Throws InputError when there is too little memory. With one rank, which has nobody to exchange with, the exchange is
// 0.
MachineSpeed measure_machine(const SpeedOptions& options);

// The machine as a cluster to model time on, each number with how it was measured or what was assumed.
struct Calibration {
  Cluster cluster;
  ClusterNotes notes;  // every number has one
};

// num_ranks 0: one for each processor.
Calibration calibrate(const std::string& name, SpeedOptions options);

}  // namespace foremoe
