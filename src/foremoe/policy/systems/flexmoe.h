#pragma once

// FlexMoE (Nie et al., SIGMOD 2023, https://doi.org/10.1145/3588964): replicas of experts follow the loads, a few at a
// time, each serving an equal part. Not public; read from its reimplementation in Hetu-Galvatron
// (https://github.com/PKU-DAIR/Hetu-Galvatron, galvatron/core/runtime/moe/prefetch/solver.py, flexmoe_method).
//
// Method. All slots are always full. Up to ten rounds a micro-step, from the placement of the one before: the expert
// with most tokens per replica gets another replica, and the one with fewest per replica, of those that have more than
// one, loses the one on its least loaded rank. The round is kept when the largest rank load or its ratio to the
// smallest falls; the first that is not kept, or a ratio of 1, ends the rounds.
//
// Where the new replica goes. Packed, as Galvatron has it: to the first rank that already holds the expert and has
// another one, whose expert with most tokens per replica goes to the slot that became free; so that fewer ranks reduce
// the expert's gradients. Spread: into the slot that became free. `packed` says which; spread is the default, as it is
// the better balanced of the two (lab/policies.md).
//
// Loads. The sum of the five micro-steps before the planned one, as in the artifact of LAER-MoE, which measures FlexMoE
// (https://github.com/Fizzmy/LAER-MoE-AE). At the start of a step: the last ones of `previous_load`, or without it the
// sum of this step, which foresight permits. `history` = 0 plans each micro-step by its own load.
//
// Routing. Inside the node first, as in the artifact (policy/inside_first.h). With `inside_first` off, all replicas of
// an expert serve equal parts. Rounds are judged by equal parts over all ranks either way, so that a kept round can
// raise the load of a rank that routing inside the node fills.
//
// Inferred. A former plan of `flexmoe` of the same shape gives the placement at the start of the step. Without one, the
// guest slots of a rank hold the first experts of the next ranks: experts get equally many replicas as far as possible,
// as in Galvatron's default placement.
//
// Not followed: Galvatron keeps a replica of every expert on each node and plans node by node. That needs E slots per
// node. Here all ranks are one group, as for EPLB.
//
// As a plan. Residency `free`. Several replicas on one rank are one replica with their parts.

#include "foremoe/policy/policy.h"

namespace foremoe {

struct FlexMoeOptions {
  int rounds = 10;  // at most, per micro-step
  bool packed = false;
  int history = 5;  // micro-steps before the planned one whose loads are summed; 0: the planned one alone
  bool inside_first = true;
};

// Which ranks hold how many replicas of which expert.
class FlexMoePlacement {
 public:
  explicit FlexMoePlacement(ArrayView<const ExpertId, 2> placement, int num_experts);  // [rank][slot]

  // One round by `load`, [expert], tokens. False, and nothing changes, when no expert can lose a replica.
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

// The rounds of one micro-step.
void flexmoe_adapt(FlexMoePlacement& placement, std::span<const std::int64_t> load, const FlexMoeOptions& options);

std::unique_ptr<Policy> make_flexmoe(const FlexMoeOptions& options = {});

}  // namespace foremoe
