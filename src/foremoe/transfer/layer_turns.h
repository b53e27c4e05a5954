#pragma once

// The turns of each layer, to ask what a lease is read by. A buffer leased for [arrives, closes] is read at every turn
// of its layer in between.

#include <optional>
#include <span>
#include <vector>

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

class LayerTurns {
 public:
  explicit LayerTurns(const TurnOrder& order);

  // The first turn of the layer after this one; none when it was the last.
  std::optional<TurnId> next(LayerId layer, TurnId after) const;
  // Does any reader of this copy need the segment? A copy that arrives after the last turn brings all of them.
  bool needs(const ScheduledCopy& copy, const Segment& segment) const;

 private:
  bool any(const ScheduledCopy& copy, Pass pass) const;

  int num_turns_ = 0;
  std::vector<std::vector<TurnId>> of_layer_;      // [layer], ascending
  std::vector<std::vector<int>> forwards_before_;  // [layer][i]: of the layer's first i turns, how many are forward
};

}  // namespace foremoe
