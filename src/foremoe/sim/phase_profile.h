#pragma once

// The work of each turn of a phase in isolation: tokens of each rank, rows exchanged, seconds of the experts.
// Micro-steps and layers are independent and are profiled in parallel.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/parallel.h"
#include "foremoe/sim/layer_rows.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {

// One layer of one micro-step.
struct LayerProfile {
  std::vector<RankRows> rows;  // [rank], of the dispatch
  double exchange = 0;         // seconds of the slowest rank: dispatch, combine or their backward
  struct Experts {
    std::vector<double> seconds;  // [rank]
    std::vector<double>
        own_first;  // [rank], the part of `seconds` without guests; empty if own experts and guests are one product
    double slowest = 0;
    double sum = 0;
    double ideal = 0;  // seconds of each rank if all had equal parts of all products

    double before_guests(RankId r) const { return own_first.empty() ? 0 : own_first[r.index()]; }
  };
  Experts forward;
  Experts backward;  // empty in a phase without backward
  struct PassedOn {
    RankId home;
    RankId guest;
    std::int64_t rows = 0;
  };
  // Rows that reach a guest through its expert's home, for plans made after dispatch. `rows` counts these at the home.
  std::vector<PassedOn> passed_on;
  double ideal_exchange = 0;  // seconds for a rank with the mean number of rows
  double sorting = 0;  // seconds to sort rows by expert, on the rank that sends the most; 0 if rows leave unsorted
  Tokens most_tokens;  // of the busiest rank
};

struct PhaseProfile {
  Array<Tokens, 2> tokens;              // [micro_step][rank], of the rank's batch
  Array<double, 2> squared_lengths;     // [micro_step][rank], Σ length² over the batch's sequences, tokens²
  Array<Tokens, 2> most_rows;           // [micro_step][rank], assignments computed in the layer with the most
  Array<Tokens, 2> total_rows;          // [micro_step][rank], sum over layers
  std::vector<LayerProfile> layers;     // [micro_step][layer]
  Array<std::int64_t, 2> rows_between;  // [from][to] node, one dispatch of each (micro-step, layer), without passed_on

  const LayerProfile& of(MicroStepId m, LayerId l, int num_layers) const {
    return layers[m.index() * static_cast<std::size_t>(num_layers) + l.index()];
  }
};

// With own_experts_first, a rank's own experts and its guests are two products; otherwise, they are one product. With
// plans_after_dispatch, rows are exchanged with homes, which forward the guests' rows. Throws InputError if plan, load
// and model do not fit each other.
PhaseProfile profile_phase(const SimulationInput& input, Phase phase, const OnlineWork& online, ThreadPool& pool);

// The profiles of both phases. They may be one profile, with backward.
struct StepProfile {
  std::shared_ptr<const PhaseProfile> recompute;
  std::shared_ptr<const PhaseProfile> policy_update;
};

// Whether plans of one load have the same profile: every micro-step has the same slots and quotas. Plans for one and
// for several micro-steps in flight may be such.
bool same_profile(const StepPlan& a, const StepPlan& b);

// Arguments and errors are those of simulate_step().
StepProfile profile_step(const SimulationInput& input, const StepPlan* recompute_plan, const OnlineWork& online,
                         ThreadPool& pool);

// Returns the profile of a group that runs the batches of these groups one after the other, one micro-step of each in
// turn, as in_more_micro_steps() arranges them (load_table.h). All groups need the same plan in every
// micro-step. If rows are short and tokens unknown, each group rounds the experts of a row for itself.
PhaseProfile in_more_micro_steps(std::span<const PhaseProfile* const> groups);

}  // namespace foremoe
