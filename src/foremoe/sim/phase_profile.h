#pragma once

// The work of every turn of a phase, apart from what other turns do: tokens of each rank, rows exchanged, seconds of
// the experts. Micro-steps and layers are independent, so they are profiled in parallel.

#include <cstdint>
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
        own_first;  // [rank], the part of `seconds` that needs no guests; empty where all is one product
    double slowest = 0;
    double sum = 0;
    double ideal = 0;  // of each rank, had it an equal part of all products

    double before_guests(RankId r) const { return own_first.empty() ? 0 : own_first[r.index()]; }
  };
  Experts forward;
  Experts backward;  // empty in a phase without
  struct PassedOn {
    RankId home;
    RankId guest;
    std::int64_t rows = 0;
  };
  // Rows that reach a guest by way of its expert's home, where plans are made after dispatch. `rows` has them as the
  // home's.
  std::vector<PassedOn> passed_on;
  double ideal_exchange = 0;  // of a rank with the mean of the rows
  double sorting = 0;         // by expert, of the rank that sends most; 0 where rows leave unsorted
  Tokens most_tokens;         // of a rank
};

struct PhaseProfile {
  Array<Tokens, 2> tokens;              // [micro_step][rank]: of the rank's batch
  Array<Tokens, 2> most_rows;           // [micro_step][rank]: assignments computed, of the layer with most
  Array<Tokens, 2> total_rows;          // [micro_step][rank]: over layers
  std::vector<LayerProfile> layers;     // [micro_step][layer]
  Array<std::int64_t, 2> rows_between;  // [from][to] node, one dispatch of each (micro-step, layer), without passed_on

  const LayerProfile& of(MicroStepId m, LayerId l, int num_layers) const {
    return layers[m.index() * static_cast<std::size_t>(num_layers) + l.index()];
  }
};

// With own_experts_first a rank's own experts and its guests are products apart, otherwise one. With
// plans_after_dispatch rows are exchanged with homes, which pass on what guests serve. Throws InputError when plan,
// load and model do not fit each other.
PhaseProfile profile_phase(const SimulationInput& input, Phase phase, const OnlineWork& online, ThreadPool& pool);

}  // namespace foremoe
