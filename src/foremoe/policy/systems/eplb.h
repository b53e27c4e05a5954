#pragma once

// EPLB (DeepSeek, https://github.com/deepseek-ai/EPLB): places all replicas by expected loads. Each replica serves an
// equal part of its expert's tokens. Five policies differ in the expected load and in the token split:
//
//                                     equal split     our exact assignment on the same placement
//   mean of a step                    eplb            eplb-exact
//   moving average, periodically      eplb-ema
//   every micro-step                  eplb-oracle     eplb-oracle-exact
//
// The mean is over the previous step if its load is given (`previous_load`), as at run time. Otherwise it is over this
// step, known from recorded routes. All tokens have equal weight, so long micro-steps count more. The oracle places
// every micro-step by its own load, and copies every expert that it places on a new rank.
//
// Moving average (review of ForeMoE, §1.5; the review's baseline EMA LB is ema.h). After every micro-step, â ← α·c + (1
// − α)·â for each expert. Before every period-th micro-step, experts are placed by â. If the previous step's load is
// given, â starts as the mean of its micro-steps and determines the first placement. Otherwise â starts as the first
// micro-step's load, and only homes serve in the first period. Among these five policies, only `eplb-ema` never looks
// ahead. Inferred: the review (like FlexMoE, LAER-MoE and others) averages over steps of pre-training, places experts
// every T steps (50, for example) and gives no α. A plan covers one step, so we average over micro-steps. Our period of
// 8 is the review's number of micro-steps per step.
//
// A rank has E/R + G slots, so there are E + R·G replicas. As in the reference, placement is hierarchical (groups to
// nodes, replicas inside nodes) if the number of router expert groups is a multiple of the number of nodes, else
// global. Load tables do not record groups. The default is one group, for which the reference chooses "global" on more
// than one node. Global is also the better of EPLB's two modes here, and reproduces the project's reference figures.
// For q30-ep64, its mean ρ is 1.298; hierarchical placement with 8 groups reaches 1.56.

#include <cstdint>
#include <optional>
#include <string>

#include "foremoe/core/array.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

// EPLB's placement of replicas, as the public reference computes it.
//
// Problem. From expected loads, choose each expert's number of replicas and their ranks. Every rank has the same number
// of replicas. Balance rank loads if the replicas of an expert serve equal parts.
//
// Method. Three greedy steps:
//   1. pack groups of experts into nodes: the heaviest group first, into the lightest node that has room;
//   2. on every node, add a replica for the expert with the largest load per replica until all slots are used;
//   3. pack the node's replicas into its ranks, as in step 1.
// If the groups cannot be divided evenly among the nodes, steps 2 and 3 treat all ranks as one node ("global").
// An expert may get several replicas on one rank.
//
// Arithmetic. Single precision, as in the reference: sums of weights are exact below 2²⁴.
// Ties. A further replica goes to the expert with the lowest id, an item to the pack with the lowest number. Among
// items of equal weight, the later is packed first. The reference uses torch.sort, which does not define this order.
// This order reproduces the project's reference figures on all load tables. Packing the earlier first gives 1.4835
// instead of 1.483 (q30-ep8-bursty) and 1.9077 instead of 1.907 (q30-ep16-bursty).
// Complexity. O(replicas · log replicas) per layer.
//
// Source. https://github.com/deepseek-ai/EPLB, rebalance_experts. Tests compare with its physical_to_logical_map and
// expert_count on integer weights. It calls ranks "GPUs".

struct EplbShape {
  int num_experts = 0;
  int num_replicas = 0;  // of all experts; a multiple of num_ranks
  int num_ranks = 1;
  int num_nodes = 1;   // must divide num_ranks if it divides num_groups
  int num_groups = 1;  // of consecutive experts, of equal size
};

// Returns the reason why this shape cannot be placed, or nullopt if it can.
std::optional<std::string> eplb_shape_error(const EplbShape& shape);
// Throws InputError with that reason, or if the shape has another number of experts.
void expect_placeable(const EplbShape& shape, std::size_t num_experts);

struct EplbPlacement {
  Array<ExpertId, 3> slot_expert;  // [layer][rank][slot], num_replicas / num_ranks slots, none empty
  Array<int, 2> num_replicas;      // [layer][expert], at least 1
};

// `weight` is [layer][expert], nonnegative tokens in any unit. Throws the errors of expect_placeable().
EplbPlacement eplb_rebalance(ArrayView<const std::int64_t, 2> weight, const EplbShape& shape);

enum class EplbMode : std::uint8_t {
  kAsReference,   // hierarchical if num_groups is a multiple of num_nodes, else global
  kHierarchical,  // skipped if num_groups is not such a multiple
  kGlobal,        // all ranks as one node
};

struct EplbOptions {
  EplbMode mode = EplbMode::kAsReference;
  int num_groups = 1;  // of consecutive experts, ≥ 1; above 1 if the router limits each token to some groups
};

struct EplbEmaOptions {
  EplbOptions placement;
  double decay = 0.1;  // α, weight of the newest micro-step, in (0, 1]
  int period = 8;      // micro-steps between placements, ≥ 1
};

std::unique_ptr<Policy> make_eplb(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_exact(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_ema(const EplbEmaOptions& options = {});
std::unique_ptr<Policy> make_eplb_oracle(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_oracle_exact(const EplbOptions& options = {});

}  // namespace foremoe
