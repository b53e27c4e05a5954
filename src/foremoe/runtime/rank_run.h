#pragma once

// Execution of one policy and phase on one rank, and its results. Repeats the phase, with and without overlapped
// copies, to measure minimum times and to check that all repeats produce the same bits. After a policy update, also
// runs an optimizer step and any further steps.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/runtime/critical_path.h"
#include "foremoe/runtime/moe_model.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/runtime/run_result.h"

namespace foremoe {

// Identical on every rank except for observers such as the timeline.
struct PhaseRun {
  const LoadTable& load;
  const StepPlan& plan;
  std::shared_ptr<const TransferSchedule> schedule;
  const ReplayRoutes& routes;
  std::vector<std::uint8_t> without_route;  // as in PhaseParts; see rows_without_route()
  ModelSize model;
  HomeMemory home_memory = HomeMemory::kShared;
  ArrayView<const RankId, 2> initial_home;  // [layer][expert]; experts move to the plan's homes first
  Optimizer optimizer;
  PhaseOptions options;                   // for every repeat; run_phase() sets version, overlap, most_tokens and
                                          // position_independent, and records a timeline of the first repeat only
  int repeats = 1;                        // ≥ 1; repeats of the first step
  int steps = 1;                          // ≥ 1; phases without backward run one step
  bool bitwise = false;                   // bits of a row do not depend on its position; doubles the repeats
  bool gather = true;                     // gather the reference's inputs at rank 0
  std::function<void(const Turn&)> work;  // caller's work before each turn; may wait for the plan
};

// Complete at rank 0; unspecified on other ranks.
struct PhaseOutcome {
  // First step. `turns` covers all repeats; other figures are from the fastest repeat with overlapped copies.
  TurnTable turns;
  CriticalPath critical_path;
  TransferFigures transfer;  // sums over ranks, except exposed_seconds: the longest wait of a rank
  double step_seconds = 0;   // from bind to unbind, on the slowest rank
  Bytes arena;               // sum over nodes
  double arena_refresh_seconds = 0;
  Bytes guest_weights;  // maximum over ranks; likewise guest_gradients
  Bytes guest_gradients;
  Bytes gradient_returns;  // sum over ranks; likewise home_moves
  Bytes home_moves;
  std::int64_t fallbacks = 0;
  std::optional<double> plain_critical_path_seconds;  // bitwise runs: path without position-independent rows

  std::vector<double> losses;      // [step]; empty without backward
  StepResult result;               // first step; empty unless gathered
  std::vector<RoutesUsed> routes;  // [step]; one entry if every row has a route; empty unless gathered
  ResultDigest digest;             // first step
  std::string result_digest;       // all steps, and the weights after the last
  bool repeats_equal = true;
};

// Collective. Throws InputError if arguments are inconsistent or ranks have different plans.
PhaseOutcome run_phase(const PhaseRun& run, Communicator& communicator);

}  // namespace foremoe
