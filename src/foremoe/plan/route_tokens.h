#pragma once

// Routing as a function of loads and plan: which replica serves which rows, in one layer at one event.
//
// Problem. Every source rank holds rows (token–expert assignments), every replica has a quota; for each expert
//   both have the same sum. Decide which rows go to which replica so that all ranks reach the same answer
//   without talking to each other.
// Method. For each expert three sweeps, sources ascending: to the replica on the source's own rank, then to those
//   on its node, then to all others. Within a sweep a source takes its rows in row order and replicas by
//   ascending rank, exhausting one before the next.
// Invariant. After a sweep no source has both rows left and quota left within that sweep's reach.
// Guarantee. All rows are placed and all quotas met. For these quotas as many rows as possible stay on their
//   rank, and as many as possible on their node. A sweep forms at most sources + replicas − 1 pairs per expert.
// Complexity. O(ranks · experts + slots + shipments).
//
// What follows from it without an exchange of counts: the replica that serves each row (assign_shipments, the only
// function that knows how an expert's rows are divided among its replicas), and how many rows every rank sends to every
// other, which are the split sizes of the all-to-all (dispatch_table, token_dispatch).

#include <span>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

// What the slots of one layer hold and owe at one event.
struct LayerQuotas {
  ArrayView<const ExpertId, 2> slot_expert;  // [rank][slot], kNoExpert when empty; an expert at most once per rank
  ArrayView<const Tokens, 2> slot_tokens;    // [rank][slot], quota
};

LayerQuotas layer_quotas(const StepPlan& plan, EventId event, LayerId layer);

// Rows of one expert that one source sends to one replica; never zero.
struct Shipment {
  ExpertId expert;
  RankId source;
  RankId replica;
  Tokens rows;
  SlotId slot;  // of the replica

  friend bool operator==(const Shipment& a, const Shipment& b) {  // expert and replica determine the slot
    return a.expert == b.expert && a.source == b.source && a.replica == b.replica && a.rows == b.rows;
  }
};

// All shipments of one layer at one event, by source, then expert, then in the order in which the sweeps made
// them: the rows of (source, expert) go to its shipments one after the other.
struct RoutedLayer {
  std::vector<Shipment> shipments;
  std::vector<std::size_t> first;  // [ranks + 1], each source's first shipment

  std::span<const Shipment> of_source(RankId s) const {
    return std::span(shipments).subspan(first[s.index()], first[s.index() + 1] - first[s.index()]);
  }
};

// The shipments that one rank sends or receives; those between others are left out.
struct RoutedRank {
  std::vector<Shipment> sent;      // by expert, then in the order in which the sweeps made them
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
  std::vector<std::int64_t> rows_left;     // [ranks], of the expert at hand
  std::vector<std::int64_t> total;         // [expert], rows of all sources
  std::vector<Shipment> by_expert;
  std::vector<std::size_t> cursor;
  std::vector<std::int32_t> shipment;  // [row]
};

struct RoutingProblem {
  ArrayView<const Tokens, 2> load;  // [source rank][expert], rows
  LayerQuotas quotas;               // over the replicas of an expert they sum to its load
  Topology topology;
};

// Throws InputError, field `slot_tokens`, where the quotas of an expert are not its load.
void route_tokens(const RoutingProblem& problem, RouteWorkspace& workspace, RoutedLayer& routed);
RoutedLayer route_tokens(const RoutingProblem& problem);

// The same shipments, of one rank alone: an expert with a single replica needs no sweep.
void route_tokens_of(const RoutingProblem& problem, RankId rank, RouteWorkspace& workspace, RoutedRank& routed);

// Which shipment carries each row: of_row[row] becomes an index into `sent`, −1 where routes[row] is negative. `sent`
// are a source's shipments by expert, as route_tokens() and route_tokens_of() make them. False when the rows are not
// those that they count: more or fewer of an expert, or an expert that is none of theirs; `of_row` is then unspecified.
bool assign_shipments(std::span<const Shipment> sent, std::span<const ExpertId> routes, RouteWorkspace& workspace,
                      std::span<std::int32_t> of_row);

// A row without a route: it goes to the home of whatever expert the router picks when the layer runs.
inline constexpr RankId kNoReplica{-1};

// The concrete rows of one source.
struct SourceRows {
  RankId source;
  std::span<const ExpertId> routes;  // [row] = [token][k], tokens in the order in which the source holds them
};

// The replica that serves each row: replica[row] for rows.routes[row], kNoReplica where that is negative (no
// route, or no assignment). The routes must be those that the routed load counts.
void assign_rows(const RoutedLayer& routed, const SourceRows& rows, RouteWorkspace& workspace,
                 std::span<RankId> replica);

// Which tokens a source rank holds in a micro-step, in row order: its sequences ascending, each from its first
// token to its last. This is the order in which counts, routing and dispatch agree.
class SourceTokens {
 public:
  // Keeps a reference to the trace; the batching must be one of its sequences.
  SourceTokens(const RoutingTrace& trace, const Batching& batching);

  int num_ranks() const { return num_ranks_; }
  int top_k() const { return trace_.top_k; }
  std::span<const int> sequences(MicroStepId m, RankId source) const;  // ascending

  // The routes of one layer, [token][k] in row order, kNoExpert in missing rows. Replaces what `routes` held.
  void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const;

 private:
  const RoutingTrace& trace_;
  int num_ranks_ = 0;
  std::vector<std::size_t> first_;  // [micro_steps · ranks + 1], into sequences_
  std::vector<int> sequences_;
};

// [source rank][destination rank], one row per token–expert assignment; the diagonal stays on its rank. A column is
// what that rank receives.
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
