#pragma once

// Figures of a plan, as printed by `foremoe plan --json` and compared in tables. plan_json.h converts them to JSON.
//
// Balance and traffic are measured over the (layer, micro-step) pairs with load. With more than one micro-step in
// flight a pair still counts once, since both passes have the same quotas. Copies and guests are measured over all
// (layer, event) pairs.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/parallel.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct Spread {
  double mean = 0;
  double p99 = 0;  // linear interpolation, as in numpy.percentile
  double max = 0;
};

// `empty` is the value of all three figures if there are no samples.
Spread spread_of(std::vector<double> samples, double empty);

struct PlanFigures {
  std::string policy;
  Residency residency = Residency::kResident;
  int events = 0;
  int micro_steps = 0;
  int layers = 0;
  int ranks = 0;
  int ranks_per_node = 0;
  int experts = 0;
  int guest_slots = 0;
  int in_flight = 0;

  double max_vio = 0;                // violations of the experts' loads, which no plan changes: see load_violation();
  double avg_vio = 0;                // mean over the pairs
  Spread rho;                        // largest rank load ÷ mean rank load; 1 is perfect
  double rho_lower_bound_mean = 0;   // ⌈mean⌉ ÷ mean
  int align = 0;                     // tokens
  Spread rho_padded;                 // largest rank load, with replicas padded to multiples of align, ÷ mean rank load
  std::int64_t max_rank_tokens = 0;  // largest load of a rank in any pair
  std::int64_t copies = 0;           // in the whole step
  double copies_per_layer_event = 0;
  int copies_max_per_rank = 0;  // in one event and layer
  int home_moves = 0;           // (layer, expert) pairs whose home is not the initial one
  double guests_per_layer = 0;  // mean over (layer, event) of the guests with quota on all ranks

  // Per pair: token–expert assignments that the busiest node sends to or receives from other nodes. As many stay on
  // their node as the quotas allow.
  Spread node_link_tokens;
  // The same traffic in rows, one per token and node, as route_tokens sends them. nullopt if the tokens are unknown.
  std::optional<Spread> node_link_rows;
};

struct FiguresOptions {
  ArrayView<const RankId, 2> initial_home = {};  // [layer][expert], homes before the plan; empty: contiguous blocks
  int align = 128;                               // tokens, ≥ 1
  const BatchedTrace* tokens = nullptr;          // the tokens that the load counts; null: unknown
  const ThreadPool* pool = nullptr;              // plan_figures() throws Cancelled after this pool is cancelled
};

// Requires a plan that check_plan accepts for this load. Uses the plan's nodes. Throws the errors of
// expect_valid(plan, load), and InputError for options that do not fit.
PlanFigures plan_figures(const StepPlan& plan, const LoadTable& load, const FiguresOptions& options = {});

}  // namespace foremoe
