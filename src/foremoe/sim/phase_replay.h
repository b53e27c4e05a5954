#pragma once

// Replays the turns of a phase in order. Each part of a turn takes as long as its slowest rank; transfers run
// concurrently.

#include "foremoe/sim/phase_profile.h"
#include "foremoe/sim/phase_transfers.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/transfer/cluster_links.h"

namespace foremoe {

struct ReplayProblem {
  const SimulationInput& input;
  const SimulationOptions& options;
  const PhaseProfile& profile;
  const PhaseTransfers& transfers;
  const ClusterLinks& links;
  double layer_scale = 1;    // layers of the model per layer of the plan
  double start_seconds = 0;  // start of the timeline

  int home_experts() const { return input.plan.num_experts() / input.plan.num_ranks(); }  // of a rank in one layer
};

struct Replay {
  PhaseSeconds parts;                 // of the plan's layers, without arena, optimizer and gathering of weights
  double ideal_seconds = 0;           // without arena and optimizer
  double ideal_exchange_seconds = 0;  // the part of ideal_seconds for dispatch and combine
  double mean_expert_seconds = 0;     // the mean rank's share of parts.experts
  double computing_seconds = 0;       // Σ over ranks
  std::vector<Bytes> copy_bytes;      // [link]
  std::vector<Bytes> gradient_bytes;  // [link]
  Array<Bytes, 2> copies_between;     // [from][to] node
};

Replay replay_phase(const ReplayProblem& problem);

}  // namespace foremoe
