#pragma once

// What token_dispatch() (plan/route_tokens.h) would count if tokens were known, where only a load is: an expectation.
//
// Model. Tokens of a source choose their experts as token_choice.h says, one like the other. An expert's rows go to its
//   shipments one after the other, so that where a token lies among those of its source decides which replica serves
//   each of its experts.
// Guarantees. Of a source, no more rows to a place than assignments, no fewer than of its busiest expert there. Whole
//   rows, rounded so that their sum over places is that of the expectations.
// Complexity. O(shipments + that of TokenChoice for each shipment that splits the rows of a source's expert).

#include <span>
#include <vector>

#include "foremoe/plan/route_tokens.h"
#include "foremoe/plan/token_choice.h"

namespace foremoe {

struct ExpectedDispatchProblem {
  ArrayView<const Tokens, 2> load;  // [source rank][expert], as it was routed
  int top_k = 1;
  ExpertGroups groups;
  Topology topology;
};

TokenDispatch expected_token_dispatch(const RoutedLayer& routed, const ExpectedDispatchProblem& problem);

}  // namespace foremoe
