#pragma once

// Figures that papers tell and plan_figures does not: over the (layer, micro-step) pairs with load, exact.

#include <array>

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct PairFigures {
  std::array<double, kNumRhoBuckets> share_of_bucket{};  // of the pairs, sums to 1
  double straggler = 0;                                  // max − mean rank load, tokens, mean over pairs
  double waste = 0;  // (max − mean) ÷ max, mean: of the busiest rank's time, what the mean one waits
  double copies_after_first_event = 0;  // per layer and event, those of the first event left out
  double busiest_receiver = 0;          // copies into the rank that receives most, mean over layers and events
  double sent_without_locality = 0;     // most tokens that a rank sends or receives, mean over pairs, when replicas are
  double sent_with_rank_locality = 0;   // filled without regard to where tokens are; own rank first;
  double sent_with_node_locality = 0;   // own rank, then own node first (as a plan is routed)
  double between_nodes = 0;             // so routed, the most tokens that a node sends or receives, mean over pairs
};

// `routed`: also what is sent, which takes longer than all else together.
PairFigures pair_figures(const StepPlan& plan, const LoadTable& load, bool routed = true);

// How a step's expert popularity compares with that of its micro-steps: the observation of ForeMoE's figure 4.
struct LoadStability {
  double hottest = 0;      // tokens of a step's most popular expert ÷ mean expert, mean over steps and layers
  double step_change = 0;  // half the sum of |share − share before| over experts, from step to step; NaN of one step
  double micro_step_change = 0;  // the same from micro-step to micro-step within a step
};

// The micro-steps are `steps` steps of equal length.
LoadStability load_stability(const LoadTable& load, int steps);

}  // namespace foremoe
