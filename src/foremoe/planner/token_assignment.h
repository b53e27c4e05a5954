#pragma once

// Stage T: quotas for a fixed placement, exactly and in integers.
//
// Problem. Expert e has w(e) tokens and sits in some slots. Give every slot a quota, so that the quotas of an
// expert's slots sum to w(e) and the largest rank load is as small as possible.
//
// Method. Start from any assignment and a target: the larger of ⌈mean⌉ and the densest expert's ⌈tokens / holders⌉.
// While a rank is above the target, search breadth-first from all such ranks: from rank a to rank b when an expert
// with tokens on a is also held by b. Reaching a rank below the target, move tokens along the path. When a search
// moves none, the set S of ranks that it visited is closed: no expert with tokens in S is held outside S, so all of
// these tokens must be served within S under any assignment, and the target rises to ⌈load(S) / |S|⌉.
//
// Optimal, because the target is at every moment a lower bound: S is the certificate (the maximum density of an
// induced subgraph, FineMoE eq. 3), and the assignment that ends the search attains it. Moves are whole tokens, so
// the optimum is integral and equals the ceiling of the fractional one.
//
// Complexity. A search costs O(slots) and ends early when it has visited every rank. Its paths are shortest ones, so
// that (as Edmonds and Karp count) the number of searches does not depend on the loads. The closed sets of rising
// targets shrink, so the target rises at most R times; seldom more than once. Quotas and loads are 64-bit: sums of
// loads near 2³¹ are exact.
//
// Prior art. With one token per (expert, slot) edge this is an optimal semi-matching: Harvey, Ladner, Lovász, Tamir,
// "Semi-matchings for bipartite graphs and load balancing" (WADS 2003; J. Algorithms 59, 2006), whose cost-reducing
// paths are the paths here. A target that rises while the flow is kept is parametric maximum flow: Gallo, Grigoriadis,
// Tarjan (SIAM J. Comput. 18, 1989). The certificate is a densest subgraph: Goldberg, "Finding a maximum density
// subgraph" (Berkeley, 1984).
//
// Example.
//   ReplicaGraph graph(num_ranks, slots_per_rank, num_experts);
//   graph.put(graph.first_slot(rank), expert);  // … where every replica sits
//   Assignment assignment;
//   water_fill(graph, load, assignment);        // load is [expert], tokens; any other start will do
//   AssignmentSearch search;                    // reuse it from call to call
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

// Moves tokens between ranks until a target is met. Keeps its memory from call to call: a warm call allocates nothing.
class AssignmentSearch {
 public:
  // Moves tokens until no rank is above `target` or no more can be moved. Returns the tokens that remain above, which
  // are as few as under any assignment. When that is not 0, closed_set() is the set S.
  std::int64_t relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment);

  // The same with one search only: most of what can be moved, for a fraction of the time. Trials are weighed by it.
  std::int64_t relieve_once(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment);

  // After `relieve` that left tokens above its target: the closed set S, in the order of the visit.
  std::span<const int> closed_set() const { return {queue_.data(), static_cast<std::size_t>(num_visited_)}; }
  bool in_closed_set(int rank) const { return visited_[rank] != 0; }

 private:
  // Visits the ranks above the target; returns the tokens above it.
  std::int64_t start(const ReplicaGraph& graph, std::int64_t target, const Assignment& assignment);
  // Visits what can be reached from them and moves tokens to every room found; returns what is left of `excess`.
  std::int64_t search(const ReplicaGraph& graph, std::int64_t target, std::int64_t excess, Assignment& assignment);
  // Moves to `sink` what the path by which it was reached carries; returns that.
  std::int64_t augment(const ReplicaGraph& graph, std::int64_t target, int sink, Assignment& assignment) const;

  std::vector<int> queue_;     // the first num_visited_ are the ranks in the order of the visit
  std::vector<int> leaving_;   // [rank], slot from which the search came, −1 at a source
  std::vector<int> arriving_;  // [rank], slot of the same expert on this rank
  std::vector<char> visited_;  // [rank]
  int num_visited_ = 0;
  std::uint64_t unvisited_shadow_ = 0;  // ReplicaGraph::bit of the ranks not visited
};

// Experts that one slot holds first; then those of more than four times the mean load, then the rest, each spread over
// its holders as water fills vessels: what comes late evens out what came early. A good start for `assign_tokens`.
void water_fill(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& assignment);

// The exact optimum from any assignment of the same tokens; `lower_bound` must be one (⌈mean⌉). Returns the largest
// rank load. `tight_set`, when given, receives ranks that prove it: the tokens of the experts that they alone hold,
// divided by their number and rounded up; it stays empty when lower_bound is attained.
std::int64_t assign_tokens(const ReplicaGraph& graph, std::int64_t lower_bound, Assignment& assignment,
                           AssignmentSearch& search, std::vector<int>* tight_set = nullptr);

// Without a search: every expert's tokens in equal parts to its replicas, the remainder of one token each to the parts
// on the lowest ranks. `load` is [expert], tokens. `parts_of(slot)` says how many parts the replica in a slot serves:
// 0, it rests. An expert of which no replica serves is left out; every other one's quotas sum to its load. O(slots ·
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
