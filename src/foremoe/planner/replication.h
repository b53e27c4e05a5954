#pragma once

// Stage P: guests where the bottleneck is, for one micro-step.
//
// Problem. With the guests that are there, no assignment brings every rank to the target. Change as few guest slots as
// possible so that one does.
//
// Method. When `relieve` ends above the target it leaves a closed set S: no tokens inside can leave. Only an
// expert held wholly inside S, copied to a rank outside, can help. For each such expert the search knows how much
// excess can reach it (flow in S), for each rank outside how much room can be reached from it (flow against the arrows
// outside S), what its cheapest guest carries now and what that guest and the newcomer would do for the micro-steps to
// come. The most promising few are tried for real, by `relieve` on a scratch copy, and the best is taken; then the
// others of the few, as long as they still do what they promised. Where nothing helps, the target rises a little:
// balance is best effort, G decides.
//
// Every accepted change lowers the excess strictly, so the search ends. Cost: O(E + R·S) per round for the flows,
// O(experts in S × ranks outside) for the scores, one `relieve` per trial.

#include <cstdint>
#include <vector>

#include "foremoe/planner/copy_ledger.h"
#include "foremoe/planner/token_assignment.h"

namespace foremoe::planner {

class Replication {
 public:
  Replication(const LayerProblem& problem, const PlannerOptions& options);

  // `graph` holds the guests that micro-step m finds and ends with those that it leaves; `assignment` ends with
  // quotas of m whose largest load is the target, or as near to it as was found. Returns the number of guests copied.
  int balance(int m, ReplicaGraph& graph, Assignment& assignment);

 private:
  struct Candidate {
    float score;
    int expert;
    int rank;
    std::int64_t gain;  // tokens of excess removed, once tried
  };

  bool improve(int m, std::int64_t target, std::int64_t& excess, int mode, ReplicaGraph& graph, Assignment& assignment);
  void measure_sources(int m, std::int64_t target, std::int64_t excess, const ReplicaGraph& graph,
                       const Assignment& assignment);
  void measure_sinks(int m, std::int64_t target, const ReplicaGraph& graph, const Assignment& assignment);
  void choose_victims(int m, std::int64_t excess, int mode, const ReplicaGraph& graph, const Assignment& assignment);
  void list_candidates(int m, std::int64_t excess, const ReplicaGraph& graph);
  std::int64_t attempt(const Candidate& c, std::int64_t target, ReplicaGraph& graph, const Assignment& from,
                       Assignment& to);
  void prune(int m, std::int64_t target, ReplicaGraph& graph, Assignment& a);
  bool permitted(const Candidate& c, const ReplicaGraph& graph) const;
  float future(int m, int expert, int rank) const;

  const LayerProblem& problem_;
  CopyLedger ledger_;
  CopyLedger saved_ledger_;
  ReplicaGraph saved_graph_;
  AssignmentWorkspace workspace_;
  AssignmentWorkspace trial_workspace_;
  Assignment trial_;
  Assignment best_;
  std::vector<char> inside_;      // [rank], in the closed set
  std::vector<float> inflow_;     // [rank], excess that can reach it, shares
  std::vector<float> outlet_;     // [rank], room that can be reached from it, shares
  std::vector<float> available_;  // [expert], what a copy could carry away, shares
  std::vector<int> sources_;      // experts with available_ > 0, most first
  std::vector<int> sinks_;        // ranks outside the closed set with a slot to fill
  std::vector<int> victim_;       // [rank], guest slot to fill
  std::vector<float> capacity_;   // [rank], outlet and what its victim carries
  std::vector<float> penalty_;    // [rank], what losing the victim costs
  std::vector<int> queue_;
  std::vector<char> state_;
  std::vector<Candidate> candidates_;
};

}  // namespace foremoe::planner
