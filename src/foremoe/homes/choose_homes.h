#pragma once

// Chooses the homes of a run from recorded routes (home_search.h), and judges them on the same routes and on others.
//
// Tokens travel together with all their experts only if these share a node, so homes that gather experts which tokens
// choose together reduce the exchange between nodes, for every policy. Homes are chosen once per run, before the
// optimizer state is placed, and from routes of an earlier rollout. Held-out routes show what they gain on later ones.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/core/parallel.h"
#include "foremoe/homes/home_search.h"
#include "foremoe/plan/homes_file.h"
#include "foremoe/rollout/batching.h"

namespace foremoe {

struct HomesOptions {
  HomeSearchOptions search = {};
  std::int64_t tokens = 1 << 17;  // that the search uses per layer at most, evenly spaced
};

std::vector<Option> options_of(HomesOptions& options);

// Costs of contiguous and of chosen homes on the same tokens, summed over layers.
struct HomesJudgement {
  int num_sequences = 0;
  HomeCosts contiguous;
  HomeCosts chosen;
};

struct ChosenHomes {
  Homes homes;
  int num_moved = 0;                       // experts that are not at their contiguous home, over all layers
  HomesJudgement fitted;                   // on the traces from which the homes were chosen, all their tokens
  std::optional<HomesJudgement> held_out;  // on routes that the choice has not seen
};

// What a choice is judged on besides its own traces.
struct Holdout {
  double fraction = 0;                  // of the GRPO groups (sequences, if no groups are recorded) of each trace
  const BatchedTrace* trace = nullptr;  // or another trace
};

// Throws InputError if the traces differ in layers, experts, top_k, ranks or nodes, if the ranks do not divide the
// experts, if a route is malformed, or, with field `holdout`, if a trace has too few groups to hold out that fraction.
// The result does not depend on the number of threads.
ChosenHomes choose_homes(std::span<const BatchedTrace> traces, const Holdout& holdout, const HomesOptions& options,
                         ThreadPool& pool);

}  // namespace foremoe
