#pragma once

// How many rows every rank sends to every other, known before the micro-step runs: split sizes of the
// all-to-all without an exchange of counts. A column of a table is what that rank receives.

#include "foremoe/core/array.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/route_tokens.h"
#include "foremoe/plan/source_tokens.h"

namespace foremoe {

// [source rank][destination rank], one row per token–expert assignment; the diagonal stays on its rank.
Array<Tokens, 2> dispatch_table(const RoutedLayer& routed);

// With known routes a token need travel only once to each rank, or to each node, that serves any of its rows.
struct TokenDispatch {
  Array<Tokens, 2> to_rank;  // [source rank][destination rank], one row per token and rank
  Array<Tokens, 2> to_node;  // [source rank][destination node], one row per token and node
};

struct TokenDispatchProblem {
  const SourceTokens& tokens;
  MicroStepId micro_step;
  LayerId layer;
  Topology topology;
};

TokenDispatch token_dispatch(const RoutedLayer& routed, const TokenDispatchProblem& problem);

}  // namespace foremoe
