#pragma once

// Results of a step, gathered from the ranks: tensors, a digest and the cost of its turns. The tensors are compared
// with a reference. Digests compare runs bit for bit across hosts, backends and placements.
//
// Digest. SHA-256 over the SHA-256 of every tensor, in an order independent of ownership: outputs, then input gradients
// by (micro-step, source), expert gradients by (layer, expert), router gradients by (layer, source).

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

// Filled at rank 0; empty on other ranks.
struct StepResult {
  Array<std::vector<float>, 2> output;           // [micro_step][rank] → [tokens][hidden]
  Array<std::vector<float>, 2> input_gradient;   // likewise; empty tensors without backward
  Array<std::vector<float>, 2> expert_gradient;  // [layer][expert] → gate_up, then down
  Array<std::vector<float>, 2> router_gradient;  // [layer][rank] → [experts][hidden]
};

// [micro_step][rank][layer] → [token·k + j]. Filled at rank 0; empty on other ranks.
using RoutesUsed = Array<std::vector<ExpertId>, 3>;

// Collective. Call after a run of the model and before its gradients are zeroed.
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
  Array<double, 3> compute_seconds;  // [repeat][turn][rank]; CPU time of the rank's thread in its experts
  Array<std::int64_t, 2> calls;      // [turn][rank], experts that had rows
  Array<std::int64_t, 2> rows;       // [turn][rank], rows that the experts computed
};

// Imbalance ratio (largest rank ÷ mean rank) over the turns with rows; 1 if no turn has rows.
Spread imbalance(ArrayView<const std::int64_t, 2> rows);  // [turn][rank]

// Sum of the quotas of each rank's slots: [turn][rank].
Array<std::int64_t, 2> planned_rows(const StepPlan& plan, const TurnOrder& order);

Array<double, 2> least_compute_seconds(const TurnTable& turns);  // [turn][rank]; least over all repeats
double compute_seconds_total(const TurnTable& turns);            // sum of the above
// Σ over turns of the largest rank's rows: the critical path (critical_path.h) if every row takes equally long.
std::int64_t critical_path_rows(const TurnTable& turns);

}  // namespace foremoe
