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
// No other function divides an expert's rows among its replicas; assign_rows.h says which replica serves each row.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"
#include "foremoe/plan/step_plan.h"

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

// [source rank][destination rank]: rows, one per token–expert assignment. The diagonal counts rows that stay on their
// rank. A column counts the rows that its rank receives.
Array<Tokens, 2> dispatch_table(const RoutedLayer& routed);

}  // namespace foremoe
