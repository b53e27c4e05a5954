#pragma once

// Answers before a step whether it fits into the memory of the ranks, now and planned, and what limits it.
//
//   ThreadPool pool;
//   const Fit f = fit({.policy = policy, .workload = workload}, options, {.pool = pool, .cost = &cost});
//   if (f.planned.exceeds) use(f.planned.exceeds->rank);
//
// Now is vanilla: contiguous homes without guests. Planned is the policy's plan. Both are simulated, and all memory is
// the simulator's (docs/users/simulation.md, Memory of a rank).

#include <optional>
#include <vector>

#include "foremoe/evaluate/break_even.h"
#include "foremoe/evaluate/capacity.h"
#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

// One layer of one micro-step on one rank.
struct FitPlace {
  Phase phase = Phase::kRecompute;
  MicroStepId micro_step;
  LayerId layer;
  RankId rank;
  Tokens rows;   // that the rank computes
  Bytes memory;  // of the rank
};

struct FitPeak {
  Tokens rows;
  Bytes memory;
};

// The rows and the memory of one plan. All peaks are over both phases. Of equal places, the first in execution order
// is returned.
struct FitOfPlan {
  Evaluation evaluation;
  FitPlace most_rows;
  FitPlace most_memory;
  RankMemory terms;         // of the phase of most_memory
  Activations activations;  // of most_memory
  // The first event at which a rank exceeds the limit, and of that event the rank with the most memory. The layer is
  // the one in which it computes the most rows. None: the plan fits.
  std::optional<FitPlace> exceeds;
  Tokens largest_micro_batch;  // mean tokens per rank within the limit (memory_budget.h)
  std::vector<FitPeak> ranks;
  std::vector<FitPeak> layers;
  std::vector<FitPeak> micro_steps;
  std::vector<Capacity> capacities;
};

struct FitTrial {
  int guest_slots = 0;
  Bytes memory;  // of the rank with the most
};

struct Fit {
  Bytes limit;         // the memory budget; without one, the device's memory
  Tokens mean_tokens;  // of a rank and micro-step
  FitOfPlan now;
  FitOfPlan planned;
  // The fewest guest slots with which the policy's plan fits; 0 if vanilla fits. None: no number up to
  // most_guest_slots fits. `tried` has the plans made, with ascending numbers of slots.
  std::optional<int> fewest_guest_slots;
  std::vector<FitTrial> tried;
  std::vector<BreakEven> break_even;
};

struct FitRequest {
  const Policy& policy;
  const Workload& workload;
  int most_guest_slots = 4;  // to try if vanilla does not fit
};

// Throws InputError for invalid options, and if the policy has no plan for the workload. The context must have a cost
// model.
Fit fit(const FitRequest& request, const EvaluateOptions& options, const EvaluationContext& context);

}  // namespace foremoe
