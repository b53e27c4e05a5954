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

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/planner/replica_graph.h"

namespace foremoe::planner {

struct Assignment {
  std::vector<std::int64_t> quota;      // [slot], tokens; 0 in an empty slot
  std::vector<std::int64_t> rank_load;  // [rank], tokens
};

// Scratch of a search, reused from call to call: a warm call allocates nothing.
class AssignmentWorkspace {
 public:
  // After `relieve` that left tokens above its target: the closed set S, in the order of the visit.
  std::span<const int> closed_set() const { return {queue_.data(), static_cast<std::size_t>(num_visited_)}; }
  bool in_closed_set(int rank) const { return visited_[rank] != 0; }

 private:
  friend std::int64_t relieve(const ReplicaGraph&, std::int64_t, Assignment&, AssignmentWorkspace&);
  friend std::int64_t relieve_once(const ReplicaGraph&, std::int64_t, Assignment&, AssignmentWorkspace&);
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

// Moves tokens until no rank is above `target` or no more can be moved; returns the tokens that remain above, which
// are as few as under any assignment. When that is not 0, `workspace` holds the closed set.
std::int64_t relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment,
                     AssignmentWorkspace& workspace);

// The same with one search only: most of what can be moved, for a fraction of the time. Trials are weighed by it.
std::int64_t relieve_once(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment,
                          AssignmentWorkspace& workspace);

// The exact optimum from any assignment of the same tokens; `lower_bound` must be one (⌈mean⌉). Returns the largest
// rank load. `tight_set`, when given, receives ranks that prove it: the tokens of the experts that they alone hold,
// divided by their number and rounded up; it stays empty when lower_bound is attained.
std::int64_t assign_tokens(const ReplicaGraph& graph, std::int64_t lower_bound, Assignment& assignment,
                           AssignmentWorkspace& workspace, std::vector<int>* tight_set = nullptr);

}  // namespace foremoe::planner
