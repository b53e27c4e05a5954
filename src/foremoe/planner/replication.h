#pragma once

// Stage P: guests where the bottleneck is, for one micro-step.
//
// Problem. With the guests that are there, no assignment brings every rank to the target. Change as few guest slots as
// possible so that one does.
//
// Method. The most promising candidates of GuestSearch are tried for real, on a scratch copy; the best is taken, then
// the others of the short list as long as they still do most of what they did alone. When the target is reached, each
// copy is taken back if the others, perhaps with other experts in their slots, can do without it. Where nothing helps,
// the target rises by a part of what is missing: balance is best effort, the guest slots decide. Under residency
// `shared`, where every guest is a copy, the search is repeated with disturbed scores, and of the outcomes with the
// lowest target the one with the fewest copies is kept.
//
// Every accepted change lowers the excess, so the search ends; variants and levels are bounded. Cost: one scoring per
// round, one or two searches of `relieve` per trial.

#include "foremoe/planner/guest_search.h"

namespace foremoe::planner {

class Replication {
 public:
  Replication(const LayerProblem& problem, const PlannerOptions& options);

  // How long to search before giving up.
  struct Effort {
    int short_list;   // candidates tried for one change
    int long_list;    // candidates tried before none is held to help
    int replaceable;  // others may make up for a copy if they lack less than 1 / this of its tokens; 0: whatever they
                      // lack
  };

  // `graph` holds the guests that micro-step m finds and ends with those that it leaves; `assignment` ends with
  // quotas of m whose largest load is the target, or as near to it as was found.
  void balance(int m, ReplicaGraph& graph, Assignment& assignment);

  // The same by one search, whose scores are disturbed where `variant` is not 0.
  void search_variant(int variant, int m, ReplicaGraph& graph, Assignment& assignment) {
    variant_ = variant;
    search(m, graph, assignment);
  }

 private:
  struct Outcome {
    std::int64_t level = 0;  // the target, or what it was raised to
    int copies = 0;
  };

  // One attempt while it goes on. The assignment's tokens above the target are `excess`.
  struct State {
    int m;
    std::int64_t target;
    std::int64_t excess;
    ReplicaGraph& graph;
    Assignment& assignment;
  };

  Outcome search(int m, ReplicaGraph& graph, Assignment& assignment);
  bool improve(State& state, GuestSlotsToUse slots);
  std::int64_t attempt(const Candidate& c, const State& state, Assignment& to);
  void take_others(State& state, std::span<Candidate> tried);
  void take_back(int m, std::int64_t target, ReplicaGraph& graph, Assignment& assignment);
  bool permitted(const Candidate& c, const ReplicaGraph& graph) const;

  const LayerProblem& problem_;
  Effort effort_;
  int variants_;  // attempts at one micro-step
  int variant_ = 0;
  CopyLedger ledger_;
  GuestSearch guests_;
  AssignmentSearch search_;  // of the state itself: holds the closed set
  AssignmentSearch trial_search_;
  Assignment trial_;
  Assignment best_;
  std::vector<char> taken_;  // [rank], by take_others
};

}  // namespace foremoe::planner
