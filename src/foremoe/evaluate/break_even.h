#pragma once

// The micro-batch below which copies of experts do not pay.
//
// A copy moves rows of one expert from the busiest rank to another, and saves at most the time of these rows. An
// exposed copy pays if that is longer than the copy; in the policy update the guest's gradient also returns home. A
// hidden copy costs no time, but a layer must compute long enough to hide it.

#include <optional>
#include <string_view>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/cluster/topology.h"

namespace foremoe {

struct BreakEven {
  std::string_view path;      // "peers", "network", "host"
  double copy_seconds = 0;    // of one expert's weights; from the host while all ranks of the node copy
  double return_seconds = 0;  // of one expert's gradient
  // The fewest rows of one expert whose time is not shorter than the copy: forward in recompute, forward and backward
  // in the policy update, with the return of the gradient.
  Tokens recompute_rows;
  Tokens policy_update_rows;
  // The fewest tokens of a rank and micro-step with which a layer's forward hides one copy (CostModel::hidden_copies);
  // unknown for the network.
  std::optional<Tokens> hiding_tokens;
};

// One entry for each path that a group of these ranks has.
std::vector<BreakEven> break_even(const CostModel& cost, const Topology& topology);

}  // namespace foremoe
