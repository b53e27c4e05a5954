#pragma once

// Stage T: quotas for a fixed placement, exactly and in integers.
//
// Problem. Expert e has w(e) tokens and sits in some slots. Give every slot a quota, so that the quotas of an
// expert's slots sum to w(e) and the largest rank load is as small as possible.
//
// Method. Start from any assignment and a target, at first the lower bound ⌈mean⌉. While a rank is above the
// target, search breadth-first from all such ranks: from rank a to rank b when an expert with tokens on a is also
// held by b. Reaching a rank below the target, move tokens along the path. When the search reaches none, the set S of
// ranks that it visited is closed: no expert with tokens in S is held outside S, so all of these tokens must be served
// within S under any assignment, and the target rises to ⌈load(S) / |S|⌉.
//
// Optimal, because the target is at every moment a lower bound: S is the certificate (the maximum density of an
// induced subgraph, FineMoE eq. 3), and the assignment that ends the search attains it. Moves are whole tokens, so
// the optimum is integral and equals the ceiling of the fractional one.
//
// Complexity. A search costs O(slots); each augments along a shortest path or raises the target for good. Quotas
// and loads are 64-bit: sums of loads near 2³¹ are exact.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/planner/replica_graph.h"

namespace foremoe::planner {

struct Assignment {
  std::vector<std::int64_t> quota;      // [slot], tokens
  std::vector<std::int64_t> rank_load;  // [rank], tokens
};

// Scratch of a search, reused from call to call: a warm call allocates nothing.
class AssignmentWorkspace {
 public:
  void prepare(const ReplicaGraph& graph);

  // After a search that ended above its target: the closed set S, in the order of the visit.
  std::span<const int> closed_set() const { return {queue_.data(), static_cast<std::size_t>(queue_size_)}; }
  bool in_closed_set(int rank) const { return rank_mark_[rank] == mark_; }

 private:
  friend std::int64_t relieve(const ReplicaGraph&, std::int64_t, Assignment&, AssignmentWorkspace&);
  std::vector<int> queue_;        // [rank], ranks in the order of the visit
  std::vector<int> arrival_;      // [rank], slot by which the search came, −1 at a source
  std::vector<int> departure_;    // [expert], slot from which the search follows it
  std::vector<int> rank_mark_;    // [rank], visited when equal to mark_
  std::vector<int> expert_mark_;  // [expert], followed when equal to mark_
  int mark_ = 0;
  int queue_size_ = 0;
};

// All tokens of an expert to the holder with the least load, experts with the fewest holders first, then split
// evenly as water fills vessels. A good start for `relieve`.
void water_fill(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& assignment);

// Every expert's tokens to its last holder in list order, which is the slot that was put first: the home.
void serve_at_homes(const ReplicaGraph& graph, std::span<const std::int64_t> expert_load, Assignment& assignment);

// Moves tokens until no rank is above `target` or no more can be moved; returns the tokens that remain above.
// When that is not 0, `workspace` holds the closed set.
std::int64_t relieve(const ReplicaGraph& graph, std::int64_t target, Assignment& assignment,
                     AssignmentWorkspace& workspace);

// The exact optimum from any assignment of the same tokens; `lower_bound` must be one (⌈mean⌉). Returns the largest
// rank load. `tight_set`, when given, receives the ranks whose density is the certificate; it stays empty when
// lower_bound is attained.
std::int64_t assign_tokens(const ReplicaGraph& graph, std::int64_t lower_bound, Assignment& assignment,
                           AssignmentWorkspace& workspace, std::vector<int>* tight_set = nullptr);

}  // namespace foremoe::planner
