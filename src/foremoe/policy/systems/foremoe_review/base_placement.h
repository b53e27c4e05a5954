#pragma once

// BPO, the base placement optimizer of ForeMoE as its review tells it (§3.3, algorithm 1): once per step, from mean
// loads, which rank hosts an expert, and which experts have a second replica.
//
// Relocation. Experts by how far the load of their host is from ideal, farthest first: each goes to the least loaded
// other rank with room, if that is less loaded afterwards than its host was before.
// Replication. Ranks above (1 + ε)·ideal, the most loaded first: the expert with most tokens gets one replica on a rank
// with room below (1 − ε)·ideal, and half of its tokens go there.
//
// Read so. A rank's load is the sum of what it hosts (the review divides by R, as one must for the ideal alone). The
// order of experts is that before the first relocation, that of ranks the one before the first replica, as written.
// Among ranks that may take a replica the least loaded does (the order is not given). Room is E/R + G slots for hosts
// and replicas alike; the budget ΔC that the review names is used by none of its lines. One replica per overloaded
// rank, so an expert has at most one: as written, even where the rank stays overloaded.
//
// Cost. O(E·(log E + R) + R²).

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

// `load` is [expert], tokens in any unit; `host` is where the relocation begins, at most slots_per_rank on a rank.
BasePlacement place_base(std::span<const std::int64_t> load, std::vector<int> host, const BaseShape& shape,
                         double epsilon);

// Warm start: the hosts of a former step's plan. A plan does not tell hosts from replicas, so the host is the rank that
// holds the expert at most events, its home first among equals, then the lowest; when that has no room left, the next.
std::vector<int> hosts_of(const StepPlan& former, LayerId layer);

}  // namespace foremoe::review
