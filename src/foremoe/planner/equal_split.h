#pragma once

// Every expert's tokens in equal parts to its replicas, the remainder of one token each to the parts on the lowest
// ranks: what is done where no search assigns tokens.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/planner/replica_graph.h"
#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

// `load` is [expert], tokens. `parts_of(slot)` says how many parts the replica in a slot serves: 0, it rests. An expert
// of which no replica serves is left out; every other one's quotas sum to its load. O(slots · log slots).
template <class PartsOf>
void split_equally(const ReplicaGraph& graph, std::span<const std::int64_t> load, const PartsOf& parts_of,
                   Assignment& assignment) {
  assignment.quota.assign(graph.num_slots(), 0);
  assignment.rank_load.assign(graph.num_ranks(), 0);
  std::vector<int> holders;
  for (int e = 0; e < static_cast<int>(load.size()); ++e) {
    holders.clear();
    std::int64_t num_parts = 0;
    for (int s = graph.first_holder(e); s >= 0; s = graph.next_holder(s)) {
      holders.push_back(s);
      num_parts += parts_of(s);
    }
    if (num_parts == 0) continue;
    std::ranges::sort(holders);  // by rank
    std::int64_t remainder = load[e] % num_parts;
    for (const int s : holders) {
      const std::int64_t parts = parts_of(s);
      const std::int64_t extra = std::min(remainder, parts);
      assignment.quota[s] = load[e] / num_parts * parts + extra;
      assignment.rank_load[graph.rank_of(s)] += assignment.quota[s];
      remainder -= extra;
    }
  }
}

}  // namespace foremoe::planner
