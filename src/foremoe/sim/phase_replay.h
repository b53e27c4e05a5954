#pragma once

// Replays the turns of a phase one after the other. Each part of a turn takes as long as its slowest rank, and
// transfers run beside it.

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
  double layer_scale = 1;    // layers of the model for each of the plan
  double start_seconds = 0;  // where the timeline begins
};

struct Replay {
  PhaseSeconds parts;                 // of the plan's layers, without arena and optimizer
  double ideal_seconds = 0;           // likewise
  double ideal_exchange_seconds = 0;  // of them
  double mean_expert_seconds = 0;     // of parts.experts, what the mean rank computes
  double computing_seconds = 0;       // Σ over ranks
  std::vector<Bytes> copy_bytes;      // [link]
  std::vector<Bytes> gradient_bytes;  // [link]
  Array<Bytes, 2> copies_between;     // [from][to] node
};

Replay replay_phase(const ReplayProblem& problem);

}  // namespace foremoe
