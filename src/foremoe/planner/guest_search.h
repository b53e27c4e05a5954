#pragma once

// Stage P, candidates: guests that could lower the excess of a micro-step above its target, best first.
//
// Method. `relieve` left tokens above its target and the closed set S. A guest can help only if all replicas of its
// expert are inside S and its own rank is outside. Two flows limit the gain: the excess that can reach the expert's
// replicas inside S, and the room that the guest's rank can reach outside. Both are upper bounds, tight for short
// paths, computed breadth-first by adding up incoming amounts. If a new guest replaces another, the load that the
// replaced guest's home cannot absorb counts as a loss. Both guests are also scored for later micro-steps, with
// decaying weights, by the load that each could relieve as the only guest.
//
// Cost. O(E + slots) for the flows, O(sources × sinks × window) for the scores.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/planner/copy_ledger.h"
#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

enum class GuestSlotsToUse : std::uint8_t {
  kAny,
  kEmpty,   // only empty slots
  kCopied,  // only slots filled in this micro-step: replacing such a guest adds no copy
};

struct Candidate {
  float score;  // in mean rank loads
  int expert;
  int rank;
  std::int64_t gain;  // tokens of excess removed; set by the trial
};

// State of the search: micro-step m on `graph`, with `excess` tokens above `target`. `search` contains S.
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

  // Lists all candidates. A `variant` > 0 perturbs the scores deterministically, for another attempt.
  void list(const Bottleneck& b, GuestSlotsToUse slots, int variant);

  // Returns at most `count` candidates of the last list, best first. A later call returns the same candidates first.
  std::span<Candidate> best(int count);

  // Slot that a candidate of the last list on `rank` would fill.
  int slot_on(int rank) const { return slot_[rank]; }

  // Value for later micro-steps, in mean rank loads, of replacing the guest in the candidate's slot by the candidate.
  float future_change(const Bottleneck& b, const Candidate& c) const;

 private:
  void measure_sources(const Bottleneck& b);
  void measure_sinks(const Bottleneck& b);
  void choose_slots(const Bottleneck& b, GuestSlotsToUse slots);
  void score_pairs(const Bottleneck& b, int variant);
  float future(int m, int expert, int rank) const;

  const LayerProblem& problem_;
  std::uint64_t seed_;                // for the perturbed scores
  int window_;                        // number of later micro-steps considered
  std::vector<char> inside_;          // [rank], in S
  std::vector<char> seen_;            // [rank]
  std::vector<float> inflow_;         // [rank], excess that can reach the rank, tokens
  std::vector<float> outlet_;         // [rank], room that the rank can reach, tokens
  std::vector<float> available_;      // [expert], load that a copy could take over, tokens
  std::vector<int> sources_;          // experts with available > 0
  std::vector<int> sinks_;            // ranks outside S with a slot to fill
  std::vector<int> slot_;             // [rank], guest slot to fill, −1 if there is none
  std::vector<float> capacity_;       // [rank], load that a new guest could serve, shares
  std::vector<float> loss_;           // [rank], cost of removing the slot's guest, shares
  std::vector<int> queue_;            // [rank]
  std::vector<float> sink_capacity_;  // [sink], capacity_ of its rank
  std::vector<float> sink_loss_;      // [sink], loss_ of its rank
  Array<float, 2> sink_room_;         // [micro-step ahead][sink], shares
  std::vector<float> carried_;        // [sink], for one source, shares
  std::vector<float> score_;          // [sink], for one source, shares
  std::vector<float> worth_;          // [sink], for one source: value in later micro-steps, shares
  std::vector<Candidate> pairs_;
  std::ptrdiff_t num_sorted_ = 0;  // sorted elements at the front of pairs_
};

}  // namespace foremoe::planner
