#pragma once

// What one rank executes for one policy and phase, and what comes out: the phase as often as is asked, the same every
// time but for copies being overlapped or not, so that the least times can be taken and the results must be the same
// bits; then an optimizer step, and further steps where they are asked for.

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

// The same on every rank, but for what observes it.
struct PhaseRun {
  const LoadTable& load;
  const StepPlan& plan;
  std::shared_ptr<const TransferSchedule> schedule;
  const ReplayRoutes& routes;
  std::vector<std::uint8_t> without_route;  // as PhaseParts has it; see rows_without_route()
  ModelSize model;
  HomeMemory home_memory = HomeMemory::kShared;
  ArrayView<const RankId, 2> initial_home;  // [layer][expert]; where the plan moved homes, experts move first
  Optimizer optimizer;
  PhaseOptions options;                   // of every repeat; its version, overlap, most_tokens and
                                          // position_independent are set here
  int repeats = 1;                        // ≥ 1, of the first step
  int steps = 1;                          // ≥ 1; of a phase without backward there is one
  bool bitwise = false;                   // rows whose bits do not depend on their place; costs as many repeats again
  bool gather = true;                     // what a reference needs, at rank 0
  std::function<void(const Turn&)> work;  // the caller's, before each turn; may wait for the plan
};

// Complete at rank 0; elsewhere unspecified.
struct PhaseOutcome {
  // Of the first step. Turns have all repeats; everything else is of the fastest that overlapped copies.
  TurnTable turns;
  CriticalPath critical_path;
  TransferFigures transfer;  // sums over ranks; exposed_seconds of the rank that waited longest
  double step_seconds = 0;   // from bind to unbind, the slowest rank's
  Bytes arena;               // of all nodes
  double arena_refresh_seconds = 0;
  Bytes guest_weights;  // of one rank, the largest
  Bytes guest_gradients;
  Bytes gradient_returns;  // of all ranks
  Bytes home_moves;
  std::int64_t fallbacks = 0;
  std::optional<double> plain_critical_path_seconds;  // of a bitwise run: without position-independent rows

  std::vector<double> losses;      // [step]; empty without backward
  StepResult result;               // of the first step; empty unless gathered
  std::vector<RoutesUsed> routes;  // [step]; one where no row is without a route; empty unless gathered
  ResultDigest digest;             // of the first step
  std::string result_digest;       // of all steps and the weights after the last
  bool repeats_equal = true;
};

// Collective. Throws InputError when something does not fit, or when ranks hold different plans.
PhaseOutcome run_phase(const PhaseRun& run, Communicator& communicator);

}  // namespace foremoe
