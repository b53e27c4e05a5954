#pragma once

// Assigns rows to replicas in one layer at one event. It depends only on load and plan.
//
// Problem. Every source rank has rows (token–expert assignments) and every replica has a quota. An expert's rows and
//   quotas have the same sum. Assign rows to replicas such that all ranks compute the same assignment without
//   communication.
// Method. Each expert has three sweeps: to the replica on the source's rank, to those on its node, to all others. If a
//   node's sources have more rows left than its replicas have quota, they share the quota in proportion to their rows
//   (divide_fairly()), and remainders are carried from expert to expert, in ascending order. In the last sweep, sources
//   send in ascending order. With Rows::kOrder, a source fills the replicas' quotas one by one, in ascending rank
//   order. With Rows::kToken, it divides the rows of a sweep among the replicas in proportion to their remaining
//   quotas, so that it can choose which tokens go to which replica (row_choice.h).
// Invariant. After a sweep, if a source has rows left, no replica in the sweep's scope (own rank, own node, all ranks)
//   has quota left for it.
// Guarantee. All rows are placed and all quotas are met. For these quotas, the largest possible numbers of rows stay on
//   their rank and on their node. A source keeps the floor or the ceiling of its share of each expert on its node. With
//   Rows::kOrder a sweep forms at most sources + replicas − 1 pairs per expert.
// Complexity. O(ranks · experts + slots + shipments), and O(n log n) per expert for a node's n sources that share.
//
// Ranks compute two results without exchanging counts. assign_shipments computes the replica that serves each row; no
// other function divides an expert's rows among its replicas. dispatch_table and token_dispatch return the rows between
// each pair of ranks, which are the split sizes of the all-to-all.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

// Experts and quotas in the slots of one layer at one event.
struct LayerQuotas {
  ArrayView<const ExpertId, 2> slot_expert;  // [rank][slot], kNoExpert when empty; an expert at most once per rank
  ArrayView<const Tokens, 2> slot_tokens;    // [rank][slot], quota
};

LayerQuotas layer_quotas(const StepPlan& plan, EventId event, LayerId layer);

// Rows of one expert that one source sends to one replica; at least one row.
struct Shipment {
  ExpertId expert;
  RankId source;
  RankId replica;
  Tokens rows;
  SlotId slot;  // the replica's slot

  friend bool operator==(const Shipment& a, const Shipment& b) {  // expert and replica determine the slot
    return a.expert == b.expert && a.source == b.source && a.replica == b.replica && a.rows == b.rows;
  }
};

// All shipments of one layer at one event, sorted by source, then expert, then order of the sweeps. The rows of
// (source, expert) fill its shipments one after the other.
struct RoutedLayer {
  std::vector<Shipment> shipments;
  std::vector<std::size_t> first;  // [ranks + 1], index of each source's first shipment

  std::span<const Shipment> of_source(RankId s) const {
    return std::span(shipments).subspan(first[s.index()], first[s.index() + 1] - first[s.index()]);
  }
};

// The shipments that one rank sends or receives.
struct RoutedRank {
  std::vector<Shipment> sent;      // by expert, then in the order of the sweeps
  std::vector<Shipment> received;  // by expert
};

// Scratch memory, reused so that a warm call allocates nothing.
struct RouteWorkspace {
  struct Replica {
    RankId rank;
    SlotId slot;
    std::int64_t left;  // quota not yet filled
  };
  std::vector<Replica> replicas;           // by expert, then ascending rank
  std::vector<std::size_t> first_replica;  // [experts + 1]
  std::vector<std::int64_t> rows_left;     // [rank], of the current expert
  std::vector<std::int64_t> total;         // [expert], rows of all sources
  std::vector<std::int64_t> carry;         // [rank], of divide_fairly()
  std::vector<std::int64_t> share;         // [rank], rows to send in the current sweep
  std::vector<Shipment> by_expert;
  std::vector<std::size_t> cursor;
  std::vector<std::int32_t> shipment;  // [row]
  struct Next {
    std::int32_t shipment = 0;  // of the expert's next row
    std::int64_t left = 0;      // rows of this shipment
  };
  std::vector<Next> next;  // [expert]
};

// Divides a node's quota of one expert among its sources, in proportion to the rows that each has left. If the quota
// suffices for all, share = rows. Otherwise a share is rounded down, and the rows that remain go, one each, to the
// sources with the largest carries. carry: [source], the sum over the experts so far of share due − share, in 2⁻³²
// rows; updated.
void divide_fairly(std::int64_t quota, std::span<const std::int64_t> rows, std::span<std::int64_t> carry,
                   std::span<std::int64_t> share);

// How rows are assigned: in the order of ranks and rows, or such that few nodes serve each token.
enum class Rows : std::uint8_t { kOrder, kToken };

constexpr std::string_view to_string(Rows rows) { return rows == Rows::kToken ? "token" : "order"; }

struct RoutingProblem {
  ArrayView<const Tokens, 2> load;  // [source rank][expert], rows
  LayerQuotas quotas;               // an expert's quotas sum to its load
  Topology topology;
  Rows rows = Rows::kOrder;
};

// Throws InputError: field `slot_tokens` if an expert's quotas do not sum to its load, and for ids out of range and
// different numbers of ranks.
void route_tokens(const RoutingProblem& problem, RouteWorkspace& workspace, RoutedLayer& routed);
RoutedLayer route_tokens(const RoutingProblem& problem);

// Computes the same shipments for one rank only. An expert with a single replica elsewhere needs no sweeps.
void route_tokens_of(const RoutingProblem& problem, RankId rank, RouteWorkspace& workspace, RoutedRank& routed);

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

// [source rank][destination rank]: rows, one per token–expert assignment. The diagonal counts rows that stay on their
// rank. A column counts the rows that its rank receives.
Array<Tokens, 2> dispatch_table(const RoutedLayer& routed);

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
