#pragma once

// Starting point for tests and benchmarks of token assignment.

#include <cstdint>
#include <span>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

// Gives all tokens of an expert to the slot into which put() placed it first.
inline void serve_at_homes(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& a) {
  a.quota.assign(graph.num_slots(), 0);
  a.rank_load.assign(graph.num_ranks(), 0);
  for (int e = 0; e < graph.num_experts(); ++e) {
    int s = graph.first_holder(e);
    while (s >= 0 && graph.next_holder(s) >= 0) s = graph.next_holder(s);
    if (s < 0) continue;
    a.quota[s] = expert_load[e];
    a.rank_load[graph.rank_of(s)] += expert_load[e];
  }
}

}  // namespace foremoe::planner
