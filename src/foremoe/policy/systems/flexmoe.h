#pragma once

// FlexMoE (Nie et al., SIGMOD 2023, https://doi.org/10.1145/3588964): adapts replicas to the loads with a few moves at
// a time. Replicas serve equal parts. Its code is not public. We follow the reimplementation in Hetu-Galvatron
// (https://github.com/PKU-DAIR/Hetu-Galvatron, galvatron/core/runtime/moe/prefetch/solver.py, flexmoe_method).
//
// Method. All slots are always full. A micro-step makes up to ten rounds, starting from the previous placement. In a
// round, the expert with the most tokens per replica gains a replica. Among the experts with more than one replica, the
// one with the fewest tokens per replica loses its replica on the least loaded rank. A round is kept if the largest
// rank load, or its ratio to the smallest, falls. Rounds end when one is not kept or the ratio is 1.
//
// Target of the new replica. `packed` follows Galvatron: the target is the first rank that holds this expert and
// others. Of the others, the expert with the most tokens per replica moves to the freed slot. Thus fewer ranks reduce
// the gradients of the gaining expert. Without `packed` (the default), the target is the freed slot, which balances
// better (lab/policies.md).
//
// Loads. As in the artifact of LAER-MoE, which compares with FlexMoE (https://github.com/Fizzmy/LAER-MoE-AE), the load
// is the sum of the five micro-steps before the planned one. `previous_load` provides the micro-steps before the start
// of the step. Without it, the first micro-step uses the sum of this step, known from recorded routes. With `history` =
// 0, each micro-step is planned from its own load.
//
// Routing. Node-first, as in the artifact (policy/inside_first.h). With `inside_first` off, all replicas of an expert
// serve equal parts. Both settings evaluate rounds with equal parts over all ranks, so node-first routing can raise the
// load of a rank in a kept round.
//
// Inferred. The step starts with the placement of a previous `flexmoe` plan of the same shape, if any. Otherwise a
// rank's guest slots hold the home experts of the next ranks, rank by rank. As in Galvatron's default placement,
// replica counts differ by at most one.
//
// Difference: Galvatron keeps a replica of every expert on each node and plans node by node, which needs E slots
// per node. Here all ranks form one group, as for EPLB.
//
// As a plan. Residency `free`. Several replicas on one rank are merged into one that serves the sum of their parts.

#include "foremoe/policy/policy.h"

namespace foremoe {

struct FlexMoeOptions {
  int rounds = 10;  // at most, per micro-step
  bool packed = false;
  int history = 5;  // previous micro-steps whose loads are summed; 0: the planned micro-step only
  bool inside_first = true;
};

// Number of replicas of each expert on each rank.
class FlexMoePlacement {
 public:
  explicit FlexMoePlacement(ArrayView<const ExpertId, 2> placement, int num_experts);  // [rank][slot]

  // Makes one round. `load` is [expert], tokens. Returns false, without a change, if there is no replica to take.
  bool move_replica(std::span<const std::int64_t> load, bool packed);
  std::vector<std::int64_t> rank_loads(std::span<const std::int64_t> load) const;  // equal parts, [rank]
  int num_replicas(int expert) const { return num_replicas_[expert]; }
  int num_replicas(int rank, int expert) const { return replicas_(rank, expert); }
  void write(ArrayView<ExpertId, 2> placement) const;  // [rank][slot], experts ascending

 private:
  void add(int rank, int expert);
  void remove(int rank, int expert);

  Array<int, 2> replicas_;         // [rank][expert]
  std::vector<int> num_replicas_;  // [expert], at least 1
};

// Makes all rounds of one micro-step.
void flexmoe_adapt(FlexMoePlacement& placement, std::span<const std::int64_t> load, const FlexMoeOptions& options);

std::unique_ptr<Policy> make_flexmoe(const FlexMoeOptions& options = {});

}  // namespace foremoe
