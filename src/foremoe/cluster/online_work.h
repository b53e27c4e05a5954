#pragma once

// The work that a published system does between a layer's router and its experts. The simulator charges its seconds.

#include <span>

#include "foremoe/core/ids.h"

namespace foremoe {

// The peer copies of one expert in one turn.
struct CopiesOfExpert {
  RankId home;
  std::span<const RankId> ranks;  // receivers, ascending
  std::span<RankId> sources;      // sender of each copy; initially the home
  int ranks_per_node = 1;
};

// Chooses the sender of each copy. `sent` is [rank of the group]: the number of copies of earlier experts that each
// rank sends in this turn. The function may add its copies.
using ChooseSources = void (*)(const CopiesOfExpert& copies, std::span<int> sent);

// The defaults describe a system that plans before the phase begins.
struct OnlineWork {
  // Copies begin when the router of their layer and micro-step has run. A host-path arena must contain all experts.
  bool copies_after_router = false;
  // Under `shared`, copies for a backward pass begin at the same time as in systems that plan ahead, because the
  // forward pass has determined its plan. The system then needs the same number of sets of guest slots.
  bool prefetches_in_backward = false;
  // Before planning, ranks gather all ranks' counts of the layer and micro-step. Charged as planning.
  bool gathers_loads = false;
  double planning_seconds = 0;  // per layer and micro-step, between router and experts; cited in the system's file
  double planning_seconds_per_slot = 0;  // added per home and guest slot of the group; cited likewise
  // Fraction of the dispatch that needs no plan. It is sent in a separate exchange while planning runs.
  double dispatched_unplanned = 0;
  // Planning overlaps with sorting outgoing rows by expert, which hides at most the sorting time. The experts' time
  // includes sorting. Under dispatch `token`, rows are sent unsorted, so nothing is hidden.
  bool plans_beside_sorting = false;
  // After dispatch, a rank computes its own experts, then its guests. With copies_after_router, copies begin then.
  bool own_experts_first = false;
  // With own_experts_first: planning also begins after dispatch. Homes receive all rows and forward those of guests.
  bool plans_after_dispatch = false;
  // With plans_after_dispatch: results of forwarded rows return to the homes in a separate exchange before combine. If
  // false, their return takes no time.
  bool results_return = false;
  // Under `shared`, if activations are kept: guests stay from a micro-step's forward to its backward.
  bool keeps_guests = false;
  // Every expert is sharded over all ranks. Each pass of a layer gathers the experts of a rank's slots from its peers,
  // and a backward scatters their gradients (sim/sharded_experts.h). Homes store no more than other ranks.
  bool shards_experts = false;
  ChooseSources sources = nullptr;  // null: the home sends every copy
  // A gradient goes to the rank that sent the copy, which adds it to its own gradient. If false, it goes to its home.
  bool gradients_go_to_sources = false;
};

}  // namespace foremoe
