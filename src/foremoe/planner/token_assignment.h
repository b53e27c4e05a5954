#pragma once

// Stage T, token assignment: exact integer quotas for a fixed placement.
//
// Problem. Expert e has w(e) tokens and replicas in some slots. Give every slot a quota, so that the quotas of an
// expert's slots sum to w(e) and the largest rank load is minimal.
//
// Method. Start from any assignment and a target: the larger of ⌈mean⌉ and the densest expert's ⌈tokens / holders⌉.
// While any rank is above the target, search breadth-first from all ranks above it. There is an edge from rank a to
// rank b if an expert with tokens on a has a replica on b. When the search reaches a rank below the target, move tokens
// along the path to it. If a search moves none, the set S of visited ranks is closed: no expert with tokens in S has a
// replica outside. Every assignment must serve all these tokens within S, so the target rises to ⌈load(S) / |S|⌉.
//
// Guarantee. The result is optimal: the target is always a lower bound, certified by S (the maximum density of an
// induced subgraph, FineMoE eq. 3), and the final assignment attains it. Moves are whole tokens, so the optimum is
// integral and equals the ceiling of the fractional optimum.
//
// Complexity. A search costs O(slots) and ends early once it has visited every rank. It uses shortest paths, so the
// number of searches does not depend on the loads (Edmonds, Karp). Closed sets shrink as the target rises, so it rises
// at most R times, and rarely more than once. Quotas and loads have 64 bits, so sums of loads near 2³¹ do not overflow.
//
// Prior art. With one token per (expert, slot) edge this is an optimal semi-matching: Harvey, Ladner, Lovász, Tamir,
// "Semi-matchings for bipartite graphs and load balancing" (WADS 2003; J. Algorithms 59, 2006). Its cost-reducing paths
// are the paths used here. Raising the target without discarding the flow is parametric maximum flow: Gallo,
// Grigoriadis, Tarjan (SIAM J. Comput. 18, 1989). The certificate is a densest subgraph: Goldberg, "Finding a maximum
// density subgraph" (Berkeley, 1984).
//
// Example.
//   ReplicaGraph graph(num_ranks, slots_per_rank, num_experts);
//   graph.put(graph.first_slot(rank), expert);  // … for every replica
//   Assignment assignment;
//   water_fill(graph, load, assignment);        // load is [expert], tokens; any start is valid
//   AssignmentSearch search;                    // reuse it between calls
//   std::vector<int> tight;
//   assign_tokens(graph, mean, assignment, search, &tight);
//   // assignment.quota[slot] is optimal, and the ranks in `tight` prove it.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/planner/replica_graph.h"

namespace foremoe::planner {

struct Assignment {
  std::vector<std::int64_t> quota;      // [slot], tokens; 0 in an empty slot
  std::vector<std::int64_t> rank_load;  // [rank], tokens
};

// Moves tokens between ranks until a target is met. Reuses its memory between calls: a warm call allocates nothing.
class AssignmentSearch {
 public:
  // Moves tokens until no rank is above `target` or no further move exists. Returns the number of tokens above the
  // target, which is minimal over all assignments. If it is not 0, closed_set() is the set S.
  std::int64_t relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment);

  // Like relieve(), but with a single search, which makes most moves in a fraction of the time. For trials.
  std::int64_t relieve_once(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment);

  // The closed set S in visiting order, after a call of relieve() that left tokens above its target.
  std::span<const int> closed_set() const { return {queue_.data(), static_cast<std::size_t>(num_visited_)}; }
  bool in_closed_set(int rank) const { return visited_[rank] != 0; }

 private:
  // Starts a search at all ranks above the target. Returns the number of tokens above the target.
  std::int64_t start(const ReplicaGraph& graph, std::int64_t target, const Assignment& assignment);
  // Visits all reachable ranks and moves tokens to ranks below the target. Returns the remaining `excess`.
  std::int64_t search(const ReplicaGraph& graph, std::int64_t target, std::int64_t excess, Assignment& assignment);
  // Moves as many tokens as possible along the path that reached `sink`. Returns their number.
  std::int64_t augment(const ReplicaGraph& graph, std::int64_t target, int sink, Assignment& assignment) const;

  std::vector<int> queue_;      // the first num_visited_ entries are the visited ranks in order
  std::vector<int> leaving_;    // [rank], slot from which the search reached this rank, −1 at a source
  std::vector<int> arriving_;   // [rank], slot of the same expert on this rank
  std::vector<char> visited_;   // [rank]
  std::vector<char> followed_;  // [expert], 1 if all its ranks are visited; in groups of more than 64 ranks
  int num_visited_ = 0;
  std::uint64_t unvisited_shadow_ = 0;  // ReplicaGraph::bit of the unvisited ranks
};

// Assigns experts with one replica first, then those above four times the mean expert load, then the rest. Spreads each
// expert over its holders by water-filling, so later experts even out earlier ones. A good start for `assign_tokens`.
void water_fill(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& assignment);

// Computes the exact optimum from any assignment of the same tokens. `lower_bound` must not exceed the optimum
// (⌈mean⌉). Returns the largest rank load. `tight_set`, if given, receives ranks that prove optimality: ⌈tokens of
// experts with replicas only on these ranks ÷ number of these ranks⌉ is the largest load. It stays empty if lower_bound
// is attained.
std::int64_t assign_tokens(const ReplicaGraph& graph, std::int64_t lower_bound, Assignment& assignment,
                           AssignmentSearch& search, std::vector<int>* tight_set = nullptr);

// Splits every expert's tokens into equal parts, without a search. The remainder goes to the parts on the lowest ranks,
// one token each. `load` is [expert], tokens. `parts_of(slot)` is the number of parts that the replica in a slot
// serves, 0 if idle. An expert whose replicas are all idle is skipped; otherwise its quotas sum to its load. O(slots ·
// log slots).
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
