#pragma once

// Assigns the rows of a source rank to its shipments, and counts the tokens between ranks. Both depend only on load,
// plan and the source's routes, so that ranks need not exchange counts: token_dispatch, or dispatch_table in
// route_tokens.h, has the split sizes of the all-to-all.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/route_tokens.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

// Sets of_row[row] to the index in `sent` of the shipment that carries the row, or to −1 if routes[row] is negative.
// `sent`: shipments of one source by expert, from route_tokens() or route_tokens_of(). Returns false, with `of_row`
// unspecified, if the shipments' rows of an expert differ in number from those in `routes`.
bool assign_shipments(std::span<const Shipment> sent, std::span<const ExpertId> routes, RouteWorkspace& workspace,
                      std::span<std::int32_t> of_row);

// Replica of a row without a route. The row goes to the home of the expert that the router picks when the layer runs.
inline constexpr RankId kNoReplica{-1};

// The rows of one source.
struct SourceRows {
  RankId source;
  std::span<const ExpertId> routes;  // [row] = [token][k], tokens in the source's order
};

// Throws InputError, field `routes`, unless `counted`: the load counts this rank's routes. Others may have changed
// them.
void expect_counted(bool counted, RankId source);

// Sets replica[row] to the rank that serves rows.routes[row], or to kNoReplica if the route is negative (no route, or
// no assignment). Throws InputError, field `routes`, unless the routed load counts these routes.
void assign_rows(const RoutedLayer& routed, const SourceRows& rows, RouteWorkspace& workspace,
                 std::span<RankId> replica);

// The tokens of each source rank in each micro-step, in row order: its sequences in ascending order, each from first to
// last token. Counts, routing and dispatch use this order.
class SourceTokens {
 public:
  // Keeps a reference to the trace. Throws the errors of expect_valid(batching, trace).
  SourceTokens(const RoutingTrace& trace, const Batching& batching);
  SourceTokens(const RoutingTrace&& trace, const Batching& batching) = delete;

  int num_ranks() const { return num_ranks_; }
  int top_k() const { return trace_.top_k; }
  std::span<const int> sequences(MicroStepId m, RankId source) const;  // ascending

  // Sets `routes` to the routes of one layer, [token][k] in row order, with kNoExpert in missing rows and kUnassigned
  // where a row needs no expert.
  void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const;

 private:
  const RoutingTrace& trace_;
  int num_ranks_ = 0;
  std::vector<std::size_t> first_;  // [micro_steps · ranks + 1], into sequences_
  std::vector<int> sequences_;
};

// Rows if a token is sent once to each rank, or to each node, that serves any of its assignments. Needs known routes.
struct TokenDispatch {
  Array<Tokens, 2> to_rank;  // [source rank][destination rank], one row per token and rank
  Array<Tokens, 2> to_node;  // [source rank][destination node], one row per token and node
};

struct TokenDispatchProblem {
  const SourceTokens& tokens;
  MicroStepId micro_step;
  LayerId layer;
  Topology topology;
  Rows rows = Rows::kOrder;  // as in routing
};

TokenDispatch token_dispatch(const RoutedLayer& routed, const TokenDispatchProblem& problem);

}  // namespace foremoe
