#pragma once

// Estimates the counts of token_dispatch() (plan/route_tokens.h) from a load alone, without its tokens.
//
// Model. The tokens of a source are interchangeable and choose experts as described in token_choice.h. An expert's rows
//   fill its shipments one after the other, so a token's position in its source's sequence of tokens determines which
//   replica serves each of its experts.
// Guarantees. The rows that a source sends to a place (rank or node) are at most its assignments to all experts there,
//   and at least those to the busiest expert there. Rows are integers. Rounding changes their sums over ranks and over
//   nodes by at most one half, if these bounds allow. Rows per rank and per node are rounded independently, so a node's
//   rows may differ by one from any value consistent with its ranks.
// Complexity. Per source: TokenChoice::fit() and O(shipments · log shipments). Per position at which an expert switches
//   to another replica: O(shipments + ranks) and two calls of TokenChoice::misses().

#include <span>
#include <vector>

#include "foremoe/plan/assign_rows.h"
#include "foremoe/plan/token_choice.h"

namespace foremoe {

struct ExpectedDispatchProblem {
  ArrayView<const Tokens, 2> load;  // [source rank][expert], the load that was routed
  int top_k = 1;
  ExpertGroups groups;
  Topology topology;
  FittedChoices* fitted = nullptr;  // null: fits every source's choice anew
};

TokenDispatch expected_token_dispatch(const RoutedLayer& routed, const ExpectedDispatchProblem& problem);

}  // namespace foremoe
