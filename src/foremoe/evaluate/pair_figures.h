#pragma once

// Figures from papers that plan_figures() lacks. They are exact and cover the (layer, micro-step) pairs with load.

#include <array>

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct PairFigures {
  std::array<double, kNumRhoBuckets> share_of_bucket{};  // share of pairs per ρ bucket; sums to 1
  double straggler = 0;                                  // max − mean rank load, tokens, mean over pairs
  double waste = 0;  // (max − mean) ÷ max, mean over pairs: share of the busiest rank's time that the mean rank waits
  double copies_after_first_event = 0;  // per layer and event, without the first event
  double busiest_receiver = 0;          // copies into the rank that receives the most, mean over layers and events
  // The most tokens that a rank sends or receives, mean over pairs, if replicas are filled:
  double sent_without_locality = 0;    // regardless of the tokens' ranks
  double sent_with_rank_locality = 0;  // with tokens of the own rank first
  double sent_with_node_locality = 0;  // with tokens of the own rank, then of the own node first (as plans are routed)
  // The most tokens that a node sends or receives with node locality, mean over pairs.
  double between_nodes = 0;
};

// routed: also compute the tokens sent, which takes longer than all other figures together.
PairFigures pair_figures(const StepPlan& plan, const LoadTable& load, bool routed = true);

// Expert popularity of whole steps compared with that of micro-steps (ForeMoE, figure 4).
struct LoadStability {
  double hottest = 0;      // tokens of the most popular expert ÷ mean expert, per step; mean over steps and layers
  double step_change = 0;  // half the sum over experts of |share − previous share|, from step to step; NaN for one step
  double micro_step_change = 0;  // the same between micro-steps of one step
};

// Divides the micro-steps into `steps` steps of equal length.
LoadStability load_stability(const LoadTable& load, int steps);

}  // namespace foremoe
