#pragma once

// Stage P, replication: adds guests at the bottleneck, for one micro-step.
//
// Problem. With the present guests, no assignment brings every rank down to the target. Change as few guest slots as
// possible so that an assignment does.
//
// Method. Evaluate the best candidates of GuestSearch exactly, on a scratch copy, and apply the best. Apply further
// candidates of the short list while they retain most of their gain. Once the target is reached, undo each copy that
// the others, possibly with other experts in their slots, make unnecessary. If no candidate helps, groups of more than
// 64 ranks start again with more candidates per change (a quarter of the ranks, at most 128). If none of these helps,
// raise the target by a quarter of the gap to the largest load reached, since too few guest slots may make the target
// infeasible. Under residency `shared`, where every guest is a copy, repeat the search with perturbed scores. Of the
// results with the lowest target, keep the one with the fewest copies.
//
// Every accepted change lowers the excess, so the search ends; the numbers of variants and target raises are bounded.
// Cost: one scoring per round, and one or two calls of `relieve` per trial.

#include "foremoe/planner/guest_search.h"

namespace foremoe::planner {

class Replication {
 public:
  Replication(const LayerProblem& problem, const PlannerOptions& options);

  // Limits of the search.
  struct Effort {
    int short_list;   // candidates tried for one change
    int long_list;    // candidates tried if none of the short list helps
    int replaceable;  // replaces a copy only if undoing it leaves excess below its tokens / replaceable; 0: always
  };

  // On entry, `graph` has the guests present before micro-step m; on return, the guests that serve m. Sets `assignment`
  // to the quotas of m. The largest load is at the target, or above it if the search finds no better quotas.
  void balance(int m, ReplicaGraph& graph, Assignment& assignment);

  // Like balance(), but with a single search. A nonzero `variant` perturbs the scores.
  void search_variant(int variant, int m, ReplicaGraph& graph, Assignment& assignment) {
    variant_ = variant;
    search(m, graph, assignment);
  }

 private:
  struct Outcome {
    std::int64_t level = 0;  // the target, possibly raised
    int copies = 0;
  };

  // State of one attempt. `excess` is the assignment's number of tokens above the target.
  struct State {
    int m;
    std::int64_t target;
    std::int64_t excess;
    ReplicaGraph& graph;
    Assignment& assignment;
  };

  Outcome search(int m, ReplicaGraph& graph, Assignment& assignment);
  bool reach_target(State& state);
  bool improve(State& state, GuestSlotsToUse slots);
  std::int64_t attempt(const Candidate& c, const State& state, Assignment& to);
  void take_others(State& state, std::span<Candidate> tried);
  void take_back(int m, std::int64_t target, ReplicaGraph& graph, Assignment& assignment);
  bool permitted(const Candidate& c, const ReplicaGraph& graph) const;

  const LayerProblem& problem_;
  Effort usual_;
  Effort wide_;
  Effort effort_;  // of the present search
  int variants_;   // attempts per micro-step
  int variant_ = 0;
  CopyLedger ledger_;
  GuestSearch guests_;
  AssignmentSearch search_;  // for the current state: contains the closed set
  AssignmentSearch trial_search_;
  Assignment trial_;
  Assignment best_;
  std::vector<char> taken_;  // [rank], used by take_others
};

}  // namespace foremoe::planner
