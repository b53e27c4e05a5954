#pragma once

// What a system does between a layer's router and its experts where it runs as published, for the simulator to charge.

#include <span>

#include "foremoe/core/ids.h"

namespace foremoe {

// The peer copies of one expert for one turn.
struct CopiesOfExpert {
  RankId home;
  std::span<const RankId> ranks;  // that receive one, ascending
  std::span<RankId> sources;      // of each copy; the home until somebody else is chosen
};

// From which rank each copy comes. `sent` is [rank of the group], copies that it sends for this turn so far, of experts
// that were asked about before.
using ChooseSources = void (*)(const CopiesOfExpert& copies, std::span<int> sent);

// Nothing for a system that plans before the phase begins.
struct OnlineWork {
  // Its copies begin when the router of their layer and micro-step has run. An arena must hold all experts.
  bool copies_after_router = false;
  // Under `shared`, its copies of a backward, whose plan it knows from the forward, begin as early as those of systems
  // that plan ahead. That takes as many sets of guest slots.
  bool prefetches_in_backward = false;
  // It plans by all ranks' counts of the layer and micro-step, which they gather first. Part of planning.
  bool gathers_loads = false;
  double planning_seconds = 0;           // per layer and micro-step, between router and experts; source in the file
  double planning_seconds_per_slot = 0;  // besides, for every home and guest slot of the group; the file has its source
  // Part of the dispatch that needs no plan, in an exchange of its own while planning runs.
  double dispatched_unplanned = 0;
  // Planning runs while a rank sorts the rows that it sends by expert. The time of the experts has that, and hides no
  // more than it; nothing under dispatch `token`, where rows leave unsorted.
  bool plans_beside_sorting = false;
  // After dispatch a rank computes its own experts, then its guests. With copies_after_router copies begin beside them.
  bool own_experts_first = false;
  // With own_experts_first: planning begins after dispatch too, which goes to homes; they pass on the rows of guests.
  bool plans_after_dispatch = false;
  // With plans_after_dispatch: results of rows that were passed on return to the homes, in an exchange of their own
  // before combine. Else they take no time.
  bool results_return = false;
  // Under `shared`: where activations are kept, guests are kept with them, from a micro-step's forward to its backward.
  bool keeps_guests = false;
  // Every expert is sharded over all ranks: each pass of a layer gathers the experts of a rank's slots, and a backward
  // scatters their gradients, from and to peers (sim/sharded_experts.h). Homes hold nothing more than others do.
  bool shards_experts = false;
  ChooseSources sources = nullptr;  // null: the home sends every copy
  // A gradient goes to the rank that its copy came from, which adds it to its own; else straight home.
  bool gradients_go_to_sources = false;
};

}  // namespace foremoe
