#pragma once

// Where a guest would help a micro-step that its ranks cannot balance: the candidates of stage P, best first.
//
// `relieve` has ended above its target and left the closed set S. Only an expert held wholly inside S, on a rank
// outside, can help. How much is bounded by two flows: the excess that can reach the expert's holders along the paths
// inside S, and the room that can be reached from the rank against the paths outside; both are measured breadth-first,
// adding what meets (an upper bound, close where paths are short). A newcomer also gets what its slot's guest carried,
// and costs what that guest cannot hand back to its home. Both are worth something to the micro-steps to come: what
// they would carry there if they were the only guest, weighed down with distance.
//
// Cost: O(E + slots) for the flows, O(sources × sinks × window) for the scores.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/planner/copy_ledger.h"
#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

enum class GuestSlotsToUse : std::uint8_t {
  kAny,
  kEmpty,   // only slots that hold nobody
  kCopied,  // only slots that were filled in this micro-step: another guest there costs no further copy
};

struct Candidate {
  float score;  // shares of a mean rank load
  int expert;
  int rank;
  std::int64_t gain;  // tokens of excess removed, once tried
};

// One state of the search: micro-step m on `graph`, with `excess` tokens above `target` and `search` holding S.
struct Bottleneck {
  int m;
  std::int64_t target;
  std::int64_t excess;
  const ReplicaGraph& graph;
  const Assignment& assignment;
  const AssignmentSearch& search;
  const CopyLedger& ledger;
};

class GuestSearch {
 public:
  GuestSearch(const LayerProblem& problem, bool looks_ahead, std::uint64_t seed);

  // Finds all candidates. `variant` > 0 disturbs the scores, reproducibly, for another attempt.
  void list(const Bottleneck& b, GuestSlotsToUse slots, int variant);

  // The best of the last list, at most `count`, best first; those returned before keep their places.
  std::span<Candidate> best(int count);

  // Of the last list: the slot that a candidate for `rank` takes.
  int slot_on(int rank) const { return slot_[rank]; }

  // What exchanging the guest in a candidate's slot for it is worth to the micro-steps to come. Shares.
  float future_change(const Bottleneck& b, const Candidate& c) const;

 private:
  void measure_sources(const Bottleneck& b);
  void measure_sinks(const Bottleneck& b);
  void choose_slots(const Bottleneck& b, GuestSlotsToUse slots);
  void score_pairs(const Bottleneck& b, int variant);
  float future(int m, int expert, int rank) const;

  const LayerProblem& problem_;
  std::uint64_t seed_;                // of the disturbed scores
  int window_;                        // micro-steps looked ahead
  std::vector<char> inside_;          // [rank], in S
  std::vector<char> seen_;            // [rank]
  std::vector<float> inflow_;         // [rank], excess that can reach it, tokens
  std::vector<float> outlet_;         // [rank], room that can be reached from it, tokens
  std::vector<float> available_;      // [expert], what a copy could carry away, tokens
  std::vector<int> sources_;          // experts with something available
  std::vector<int> sinks_;            // ranks outside S with a slot to fill
  std::vector<int> slot_;             // [rank], guest slot to fill, −1 none
  std::vector<float> capacity_;       // [rank], what a newcomer could carry, shares
  std::vector<float> loss_;           // [rank], what giving up the slot's guest costs, shares
  std::vector<int> queue_;            // [rank]
  std::vector<float> sink_capacity_;  // [sink], as capacity_
  std::vector<float> sink_loss_;      // [sink], as loss_
  Array<float, 2> sink_room_;         // [micro-step ahead][sink], shares
  std::vector<float> carried_;        // [sink], of one source, shares
  std::vector<float> score_;          // [sink], of one source, shares
  std::vector<float> worth_;          // [sink], of one source, to the micro-steps to come, shares
  std::vector<Candidate> pairs_;
  std::ptrdiff_t num_sorted_ = 0;  // of pairs_, from the front
};

}  // namespace foremoe::planner
