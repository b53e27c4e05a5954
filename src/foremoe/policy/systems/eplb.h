#pragma once

// EPLB (DeepSeek, https://github.com/deepseek-ai/EPLB): all replicas placed anew from expected loads, each serving an
// equal part of its expert's tokens. Five policies, by what they expect and by who splits the tokens:
//
//                                     equal split     our exact assignment on the same placement
//   mean of a step                    eplb            eplb-exact
//   moving average, now and then      eplb-ema
//   every micro-step                  eplb-oracle     eplb-oracle-exact
//
// The mean is of the former step where its load is given (`previous_load`), which is what EPLB can know when it runs,
// else of this step, which foresight permits. Equal weight is given to tokens, not to micro-steps. The oracle places
// every micro-step by that micro-step's own loads, and moves whatever changes in between.
//
// Moving average (as in the review of ForeMoE, §1.5; its baseline EMA LB is ema.h). After every micro-step â ← α·c + (1
// − α)·â for each expert; before every period-th micro-step place anew by â. The step begins with the mean of the
// former step's micro-steps where that is given, and is placed by it; without it nothing is known: the first
// micro-step's loads begin the average, and homes serve alone until the first replacement. So this policy alone never
// looks ahead. Inferred: the review (as FlexMoE, LAER-MoE and others do) averages over steps of pre-training, places
// every T-th (50, for example) and gives no α; a plan is of one step, whose micro-steps take their part here, and its
// 8 micro-steps per step are our period.
//
// A rank has E/R + G slots, so that there are E + R·G replicas. As in the reference, replicas are placed hierarchically
// (groups to nodes, replicas inside nodes) when the router's expert groups divide by the nodes, else globally. Load
// tables know of no groups: one by default, so that on more than one node "global" is what the reference chooses. It
// is also the better of EPLB's two ways here, and gives the project's reference figures (with 8 groups q30-ep64 has a
// mean ρ of 1.56 instead of 1.298).

#include <cstdint>
#include <optional>
#include <string>

#include "foremoe/core/array.h"
#include "foremoe/policy/policy.h"

namespace foremoe {

// EPLB's placement of replicas, as the public reference computes it.
//
// Problem. From what each expert is expected to serve, choose how many replicas it gets and on which rank each of
// them sits, every rank holding equally many, so that the ranks are as evenly loaded as possible when the replicas of
// an expert serve equal parts.
//
// Method. Three steps, each greedy:
//   1. pack groups of experts to nodes, the heaviest first to the lightest node that has room;
//   2. on every node, give the expert whose replicas serve most another one, until there are as many as slots;
//   3. pack the node's replicas to its ranks, in the way of step 1.
// When the groups cannot be divided evenly among the nodes, steps 2 and 3 see all ranks as one node ("global").
// An expert may get several replicas on one rank.
//
// Arithmetic. As in the reference, single precision: sums of weights are exact below 2²⁴.
// Ties. Another replica goes to the expert with the lowest id, an item to the pack with the lowest number. Items of
// equal weight are packed the later one first: the reference sorts by torch.sort, which promises no order among
// equals. This order gives the project's reference figures on all load tables; the earlier one first gives 1.4835
// where they say 1.483 (q30-ep8-bursty) and 1.9077 where they say 1.907 (q30-ep16-bursty).
// Cost. O(replicas · log replicas) per layer.
//
// Source. https://github.com/deepseek-ai/EPLB, rebalance_experts. Its physical_to_logical_map and expert_count on
// integer weights are what the tests compare with; its "GPUs" are our ranks.

struct EplbShape {
  int num_experts = 0;
  int num_replicas = 0;  // of all experts; a multiple of num_ranks
  int num_ranks = 1;
  int num_nodes = 1;   // must divide num_ranks when it divides num_groups
  int num_groups = 1;  // of consecutive experts, of equal size
};

// Why this shape cannot be placed; nothing when it can.
std::optional<std::string> eplb_obstacle(const EplbShape& shape);

struct EplbPlacement {
  Array<ExpertId, 3> slot_expert;  // [layer][rank][slot], num_replicas / num_ranks slots, none empty
  Array<int, 2> num_replicas;      // [layer][expert], at least 1
};

// `weight` is [layer][expert], tokens, never negative; their unit does not matter. The shape has no obstacle.
EplbPlacement eplb_rebalance(ArrayView<const std::int64_t, 2> weight, const EplbShape& shape);

enum class EplbMode : std::uint8_t {
  kAsReference,   // hierarchical when the groups divide by the nodes, else global
  kHierarchical,  // skipped when they do not
  kGlobal,        // all ranks as one node
};

struct EplbOptions {
  EplbMode mode = EplbMode::kAsReference;
  int num_groups = 1;  // of consecutive experts, ≥ 1; more than one where the router limits a token to some of them
};

struct EplbEmaOptions {
  EplbOptions placement;
  double decay = 0.1;  // α, of the newest micro-step, in (0, 1]
  int period = 8;      // micro-steps from one placement to the next, ≥ 1
};

std::unique_ptr<Policy> make_eplb(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_exact(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_ema(const EplbEmaOptions& options = {});
std::unique_ptr<Policy> make_eplb_oracle(const EplbOptions& options = {});
std::unique_ptr<Policy> make_eplb_oracle_exact(const EplbOptions& options = {});

}  // namespace foremoe
