#pragma once

// FineMoE's scheduling of one layer's tokens in one micro-step (§5.1, appendix A): turns the tokens from every source
// to every expert into whole tokens per replica.
//
// Solvers.
//   LP 1, LP 4   replica_load_lp.h, by CLP, warm-started between micro-steps while the placement is unchanged
//   exact        LP 1 by our assignment (planner/token_assignment.h): the same largest rank load, in integers
// If CLP ends without an optimum, the exact assignment serves that micro-step.
//
// Whole tokens. The paper does not specify how x becomes integral. Inferred: round down and assign an expert's
// remaining tokens to the replicas with the largest fractions. Then move tokens above ⌈largest rank load of the LP⌉ to
// other ranks along shared experts. An integral solution at that level exists (quotas are a flow with integral
// capacities), so LP 1 reaches ⌈optimum⌉.
//
// Pipelining (A.2). The first (1 − scheduled_fraction) of a source's tokens of an expert, rounded down, are not
// scheduled: all-to-all sends them while the rest is scheduled. They are divided equally among the expert's replicas,
// with the remainder on the lowest ranks (inferred from "This EP is somehow different from typical EP and more like
// FlexMoE"). To schedule the rest, a rank's unscheduled tokens count as an additional expert that only this rank holds.
// A plan does not record the time that pipelining hides. Its quotas include the loss of balance.

#include <optional>
#include <vector>

#include "foremoe/plan/route_tokens.h"
#include "foremoe/planner/token_assignment.h"
#include "foremoe/policy/systems/finemoe/replica_load_lp.h"

namespace foremoe::finemoe {

enum class Solver : std::uint8_t {
  kReplicaLoads,        // LP 1
  kCommunicationAware,  // LP 4
  kExact,               // LP 1 by our exact assignment
};

struct SchedulerOptions {
  Solver solver = Solver::kReplicaLoads;
  CommunicationWeights weights;   // of LP 4
  double scheduled_fraction = 1;  // of the tokens, in [0, 1]; below 1: pipelining
};

class TokenScheduler {
 public:
  TokenScheduler(const Topology& topology, const SchedulerOptions& options) : topology_(topology), options_(options) {}

  // `input` is [source rank][expert], tokens; every expert with tokens is in `graph`. Fills `assignment`.
  void schedule(const planner::ReplicaGraph& graph, ArrayView<const std::int64_t, 2> input,
                planner::Assignment& assignment);

 private:
  void schedule_all(const planner::ReplicaGraph& graph, ArrayView<const std::int64_t, 2> input,
                    planner::Assignment& assignment);
  bool solve_lp(const planner::ReplicaGraph& graph, ArrayView<const std::int64_t, 2> input);
  void make_whole(const planner::ReplicaGraph& graph, std::span<const std::int64_t> load,
                  planner::Assignment& assignment);

  Topology topology_;
  SchedulerOptions options_;
  std::optional<ReplicaLoadLp> lp_;
  std::vector<int> placement_;  // [slot], expert, that lp_ was built for
  planner::AssignmentSearch search_;
};

// FineMoE's algorithm 1 (§5.2): chooses the replica that serves each of a source's tokens, from tokens per source and
// per replica.
//
//   none   for every expert, sources ascending: each fills the replicas in order of rank (lines 10–16)
//   rank   before that, every source fills the replica on its own rank (lines 4–9)
//   node   between these two, every source fills the replicas on its node (appendix A.1, topology-aware)
//
// A plan routes by route_tokens (plan/route_tokens.h), which makes the same shipments as `node`. The other two are
// ablations. Complexity: O(experts · (sources + replicas)) shipments.

enum class Locality : std::uint8_t { kNone, kRank, kNode };

// Returns nonempty shipments, by expert, then in the order of algorithm 1.
std::vector<Shipment> route_by_algorithm_1(const RoutingProblem& problem, Locality locality);

struct CommunicationVolume {  // tokens, without those that a rank serves itself
  std::int64_t ranks = 0;     // the most that any rank sends or receives: comm of LP 4
  std::int64_t nodes = 0;     // the most that any node sends to or receives from others
};

CommunicationVolume communication_volume(std::span<const Shipment> shipments, const Topology& topology);

}  // namespace foremoe::finemoe
