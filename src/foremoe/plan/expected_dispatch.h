#pragma once

// Estimates what token_dispatch() (plan/route_tokens.h) would count, where only a load is known and not its tokens.
//
// Model. The tokens of a source are interchangeable and choose their experts as token_choice.h says. The rows of an
//   expert go to its shipments one after the other, so a token's position among those of its source decides which
//   replica serves each of its experts.
// Guarantees. A source sends to a place at most as many rows as it has assignments there, and at least as many as its
//   busiest expert there has. Rows are whole numbers; rounding preserves their sum over ranks, and that over nodes, to
//   within one half, as far as these bounds allow. Ranks and nodes are rounded independently: a node may differ by a
//   row from what its ranks permit.
// Complexity. For each source TokenChoice::fit(), O(shipments · log shipments), and, for each position at which some
//   expert's replica changes, O(shipments + ranks) and TokenChoice::misses() twice.

#include <span>
#include <vector>

#include "foremoe/plan/route_tokens.h"
#include "foremoe/plan/token_choice.h"

namespace foremoe {

struct ExpectedDispatchProblem {
  ArrayView<const Tokens, 2> load;  // [source rank][expert], the load that was routed
  int top_k = 1;
  ExpertGroups groups;
  Topology topology;
};

TokenDispatch expected_token_dispatch(const RoutedLayer& routed, const ExpectedDispatchProblem& problem);

}  // namespace foremoe
