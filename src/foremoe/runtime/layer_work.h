#pragma once

// What stands for the caller's own work between MoE layers (in the product: attention): a dense matrix product of so
// many floating point operations on the rank's thread, or a wait for so long, as for a device that computes.

#include <cstdint>
#include <vector>

#include "foremoe/core/ids.h"

namespace foremoe {

struct WorkOptions {
  double flops = 1e6;  // before each layer of each pass
  double wait_ms = 0;  // above 0: a wait instead
};

// Ranks may work at the same time, each on a thread of its own.
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
