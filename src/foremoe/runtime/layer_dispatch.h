#pragma once

// Where the rows of one rank go in one layer of one micro-step, and whence it receives: everything that the two
// all-to-alls and the grouped GEMM need, from routes and plan, without a word between ranks.
//
// A row is a token–expert assignment. Sent rows lie by destination rank, then expert, then row order at the source;
// received rows by source, then expert. Computed rows lie by expert ascending, then source: one block per expert.
// Rows without a planned route are not among them (unrouted.h).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/plan/route_tokens.h"

namespace foremoe {

struct ComputedExpert {
  ExpertId expert;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
};

struct LayerDispatch {
  std::vector<std::int32_t> token_of_sent_row;   // [sent row]
  std::vector<std::int32_t> sent_row;            // [token·k + j]; −1 where the entry has no planned row
  std::vector<std::int64_t> rows_to;             // [rank]
  std::vector<std::int64_t> rows_from;           // [rank]
  std::vector<std::int32_t> received_row;        // [computed row]
  std::vector<ComputedExpert> experts;           // ascending; those with rows alone

  std::int64_t rows_sent() const { return static_cast<std::int64_t>(token_of_sent_row.size()); }
  std::int64_t rows_computed() const { return static_cast<std::int64_t>(received_row.size()); }
};

struct DispatchWorkspace {
  RouteWorkspace route;
  RoutedLayer routed;
  std::vector<RankId> replica;             // [token·k + j]
  std::vector<std::int64_t> cursor;
  std::vector<std::int64_t> block;
};

struct DispatchProblem {
  RoutingProblem routing;
  RankId rank;
  std::span<const ExpertId> routes;  // [token·k + j], of this rank as a source
  int top_k = 1;
};

void make_layer_dispatch(const DispatchProblem& problem, DispatchWorkspace& workspace, LayerDispatch& dispatch);

}  // namespace foremoe
