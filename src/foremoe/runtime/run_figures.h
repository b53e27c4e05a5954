#pragma once

// What a phase's turns cost, over all ranks.

#include "foremoe/core/array.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/transfer/turn_order.h"

namespace foremoe {

// [turn][rank]
struct TurnTable {
  Array<double, 2> compute_seconds;  // CPU time of the rank's thread in its experts
  Array<std::int64_t, 2> rows;       // that its experts ran
};

// Largest rank ÷ mean rank, over the turns that have any; 1 where there is none.
Spread imbalance(ArrayView<const std::int64_t, 2> rows);  // [turn][rank]

// [turn][rank]: the quotas of the rank's slots.
Array<std::int64_t, 2> planned_rows(const StepPlan& plan, const TurnOrder& order);

// Σ over turns of the slowest rank's compute: what ranks that wait for each other in every layer take.
double critical_path_seconds(const TurnTable& turns);
double compute_seconds_total(const TurnTable& turns);
// The same of rows: what the critical path would be if every row took as long.
std::int64_t critical_path_rows(const TurnTable& turns);

}  // namespace foremoe
