#pragma once

// Rows of one rank in one layer: destinations of its own rows, and order of received rows for the grouped GEMM. An
// executor needs no other data for its two all-to-alls. Ranks compute the rows without communication.
//
// A row is a token–expert assignment. Sent rows are ordered by destination rank, then expert, then row order at the
// source. Received rows are ordered by source, then expert, then row order. Computed rows are ordered by slot, then
// source, then row order, so the rows of a slot are contiguous. Row order is that of `order` in row_order(): with
// Rows::kToken, the source chooses which of its rows go to which replica (row_choice.h).
//
// Complexity. route_tokens_of(), plus O(ranks · slots of the rank + rows).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/plan/route_tokens.h"
#include "foremoe/plan/row_choice.h"

namespace foremoe {

struct RankDispatch {
  std::vector<std::int64_t> send;      // [rank], rows sent to that rank
  std::vector<std::int64_t> recv;      // [rank], rows received from that rank
  std::vector<std::int32_t> to_slots;  // [computed row], the index of its received row
  std::vector<std::int64_t>
      slot_offsets;                    // [slots + 1], first computed row of each slot; the last entry counts all rows
  std::vector<std::int64_t> received;  // [slot][source], rows

  std::vector<Shipment> blocks;     // of sent rows, by expert; each goes to one replica
  std::vector<std::int64_t> first;  // [block], its first sent row
  std::int64_t sent = 0;            // rows in all blocks
  RankId rank;
  Topology topology;
  Rows choice = Rows::kOrder;  // how row_slots() assigns rows to blocks
  int num_experts = 0;
  int num_slots = 0;  // per rank; row_slots() numbers slots by rank·num_slots + slot
};

// Scratch memory, reused so that a warm call allocates nothing.
struct RankDispatchWorkspace {
  RouteWorkspace route;
  RowChoiceWorkspace choice;
  RoutedRank routed;
  std::vector<std::int64_t> first;  // [slot][source], first received row
  std::vector<std::int64_t> next;   // [rank], next sent or received row; [rank·slots + slot], next sent row
  Array<Tokens, 2> home_tokens;     // [rank][home slot] of rows_at_homes()
};

// Throws InputError: field `slot_tokens` if quotas and load differ, field `load` if a rank has more than 2³¹ − 1 rows.
void rank_dispatch(const RoutingProblem& problem, RankId rank, RankDispatchWorkspace& workspace, RankDispatch& rows);

// Shipments that one rank sends and receives, both sorted by expert. Used to dispatch rows without a plan, in order.
struct Shipments {
  const RoutedRank& of_rank;
  std::size_t num_ranks = 0;
  std::size_t num_experts = 0;
  std::size_t num_slots = 0;
};
void rank_dispatch(const Shipments& shipments, RankId rank, RankDispatchWorkspace& workspace, RankDispatch& rows);

// Sets slots[i] to rank·num_slots + slot of the replica that serves routes[i], or to −1 if routes[i] is negative.
// `routes` is [token·top_k + j], of this rank. An executor needs only `slots` to send its rows. Throws InputError,
// field `routes`, if the load does not count these routes, and for spans of other sizes.
void row_slots(const RankDispatch& rows, std::span<const ExpertId> routes, int top_k, RankDispatchWorkspace& workspace,
               std::span<std::int32_t> slots);

// Sets order[i] to the index in `slots` of the entry that is sent as row i; its token is order[i] ÷ k. `slots` is the
// result of row_slots(); `order` is [rows.sent]. Throws InputError if they are not.
void row_order(const RankDispatch& rows, std::span<const std::int32_t> slots, RankDispatchWorkspace& workspace,
               std::span<std::int32_t> order);

}  // namespace foremoe
