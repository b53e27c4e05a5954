#pragma once

// What a step came to, gathered from the ranks: its tensors, to be held against a reference; its digest, by which runs
// are compared bit for bit wherever and however they ran; and what its turns cost.
//
// Digest. SHA-256 over the SHA-256 of every tensor in an order that does not depend on who holds what: outputs, then
// input gradients by (micro-step, source), expert gradients by (layer, expert), router gradients by (layer, source).

#include <string>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/moe_model.h"
#include "foremoe/transfer/turn_order.h"

namespace foremoe {

struct ResultShape {
  int micro_steps = 0;
  int layers = 0;
  int ranks = 0;
  int experts = 0;
  bool backward = false;
};

// At rank 0; elsewhere empty.
struct StepResult {
  Array<std::vector<float>, 2> output;           // [micro_step][rank] → [tokens][hidden]
  Array<std::vector<float>, 2> input_gradient;   // likewise; without backward its tensors are empty
  Array<std::vector<float>, 2> expert_gradient;  // [layer][expert] → gate_up, then down
  Array<std::vector<float>, 2> router_gradient;  // [layer][rank] → [experts][hidden]
};

// [micro_step][rank][layer] → [token·k + j]; at rank 0, elsewhere empty.
using RoutesUsed = Array<std::vector<ExpertId>, 3>;

// Collective calls, after a run of the model and before its gradients are zeroed.
StepResult gather_result(const MoeModel& model, const ResultShape& shape, Communicator& communicator);
RoutesUsed gather_routes(const MoeModel& model, const ResultShape& shape, Communicator& communicator);

struct ResultDigest {
  std::string outputs;  // hex
  std::string all;      // outputs and gradients, hex

  friend bool operator==(const ResultDigest&, const ResultDigest&) = default;
};
ResultDigest digest_result(const MoeModel& model, const ResultShape& shape, Communicator& communicator);
std::string digest_weights(const MoeModel& model, const ResultShape& shape, Communicator& communicator);

struct TurnTable {
  std::vector<Pass> pass;            // [turn]
  Array<double, 3> compute_seconds;  // [repeat][turn][rank], CPU time of the rank's thread in its experts
  Array<std::int64_t, 2> calls;      // [turn][rank], experts that had rows
  Array<std::int64_t, 2> rows;       // [turn][rank], that its experts ran
};

// Largest rank ÷ mean rank, over the turns that have any; 1 where there is none.
Spread imbalance(ArrayView<const std::int64_t, 2> rows);  // [turn][rank]

// [turn][rank]: the quotas of the rank's slots.
Array<std::int64_t, 2> planned_rows(const StepPlan& plan, const TurnOrder& order);

Array<double, 2> least_compute_seconds(const TurnTable& turns);  // [turn][rank], of all repeats
double compute_seconds_total(const TurnTable& turns);            // of these
// Σ over turns of the largest rank's rows: what the critical path (critical_path.h) is if every row takes as long.
std::int64_t critical_path_rows(const TurnTable& turns);

}  // namespace foremoe
