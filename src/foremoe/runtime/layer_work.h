#pragma once

// Simulates the caller's work between MoE layers (in production: attention). Either multiplies dense matrices on the
// rank's thread, with a given number of floating point operations, or sleeps for a given time, as if a device computed.

#include <cstdint>
#include <vector>

#include "foremoe/core/ids.h"

namespace foremoe {

struct WorkOptions {
  double flops = 1e6;  // before each layer of each pass
  double wait_ms = 0;  // above 0: sleep instead
};

// Thread-safe for distinct ranks.
class LayerWork {
 public:
  LayerWork(const WorkOptions& options, int num_ranks);
  void operator()(RankId rank);

 private:
  struct Matrices {
    std::vector<float> a, b, c;  // [kWidth][kWidth]
  };
  static constexpr std::size_t kWidth = 64;
  void multiply(Matrices& of_rank) const;

  WorkOptions options_;
  std::vector<Matrices> matrices_;  // [rank]
};

}  // namespace foremoe
