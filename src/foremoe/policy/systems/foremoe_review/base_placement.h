#pragma once

// BPO, the base placement optimizer of ForeMoE as described in its review (§3.3, algorithm 1): once per step, chooses
// from mean loads the rank that hosts each expert, and the experts that get a second replica.
//
// Relocation. Experts are visited by the distance of their host's load from ideal, farthest first. An expert moves to
// the least loaded other rank with room if that rank's new load is below the host's old load.
// Replication. Visits ranks above (1 + ε)·ideal, most loaded first. The expert with the most tokens gets one replica on
// a rank with room below (1 − ε)·ideal. The replica serves half of the tokens.
//
// Our reading. A rank's load is the sum over its experts (the review divides by R, which is correct only for the
// ideal). The order of experts is fixed before the first relocation, the order of ranks before the first replica, as in
// the review. Among the ranks that may receive a replica, we choose the least loaded (the review gives no order). Hosts
// and replicas share E/R + G slots. The review never uses its budget ΔC. As in the review, each overloaded rank
// replicates one expert once, even if it stays overloaded, so no expert gets a second replica.
//
// Complexity. O(E·(log E + R) + R²).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/ids.h"
#include "foremoe/plan/step_plan.h"

namespace foremoe::review {

struct BaseShape {
  int num_ranks = 1;
  int slots_per_rank = 1;  // E/R + G
};

struct BasePlacement {
  std::vector<int> host;     // [expert], rank
  std::vector<int> replica;  // [expert], another rank, or −1

  bool holds(int rank, int expert) const { return host[expert] == rank || replica[expert] == rank; }
};

// `load` is [expert], tokens in any unit. `host` is the initial host of each expert, at most slots_per_rank per rank.
BasePlacement place_base(std::span<const std::int64_t> load, std::vector<int> host, const BaseShape& shape,
                         double epsilon);

// Returns the hosts of a previous plan, for a warm start. A plan does not distinguish hosts from replicas, so the host
// is the rank with the expert at the most events; ties go to the home, then to the lowest rank. Full ranks are skipped.
std::vector<int> hosts_of(const StepPlan& former, LayerId layer);

}  // namespace foremoe::review
