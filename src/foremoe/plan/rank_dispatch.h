#pragma once

// The rows of one rank in one layer: where those that it holds go, and how those that come lie for the grouped GEMM.
// An executor needs no more for its two all-to-alls, and no word between ranks.
//
// A row is a token–expert assignment. Sent rows lie by destination rank, then expert, then row order at the source;
// received rows by source, then expert, then row order; computed rows by slot, then source, then row order: the rows
// of a slot are one block.
//
// Complexity. That of route_tokens_of(), and O(ranks · slots of the rank + rows).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/plan/route_tokens.h"

namespace foremoe {

struct RankDispatch {
  std::vector<std::int64_t> send;      // [rank], rows for that rank
  std::vector<std::int64_t> recv;      // [rank], rows from that rank
  std::vector<std::int32_t> to_slots;  // [computed row], the received row that lies there
  std::vector<std::int64_t>
      slot_offsets;                    // [slots + 1], first computed row of each slot; the last is how many there are
  std::vector<std::int64_t> received;  // [slot][source], rows

  std::vector<Shipment> blocks;     // of sent rows, each for one replica of one expert: by expert
  std::vector<std::int64_t> first;  // [block], its first sent row
  std::int64_t sent = 0;            // rows of all blocks
  RankId rank;
  int num_experts = 0;
  int num_slots = 0;  // of each rank: what slots are numbered by in row_slots()
};

// Scratch memory, reused so that a warm call allocates nothing.
struct RankDispatchWorkspace {
  RouteWorkspace route;
  RoutedRank routed;
  std::vector<std::int64_t> first;  // [slot][source], first received row
  std::vector<std::int64_t> next;   // [rank], next sent or received row; [rank·slots + slot], next sent row
  Array<Tokens, 2> home_tokens;     // [rank][home slot] of rows_at_homes()
};

// Throws InputError, field `slot_tokens`, where the quotas of an expert are not its load.
void rank_dispatch(const RoutingProblem& problem, RankId rank, RankDispatchWorkspace& workspace, RankDispatch& rows);

// The same from shipments, for rows that no plan divides: those that this rank sends and receives, both by expert.
struct Shipments {
  const RoutedRank& of_rank;
  std::size_t num_ranks = 0;
  std::size_t num_experts = 0;
  std::size_t num_slots = 0;
};
void rank_dispatch(const Shipments& shipments, RankId rank, RankDispatchWorkspace& workspace, RankDispatch& rows);

// The replica that serves each entry of `routes`, this rank's, [token·k + j]: slots[i] becomes rank·num_slots + slot,
// or −1 where routes[i] is negative. This alone tells an executor where its rows go. Throws InputError, field `routes`,
// when they are not those that the load counts.
void row_slots(const RankDispatch& rows, std::span<const ExpertId> routes, RankDispatchWorkspace& workspace,
               std::span<std::int32_t> slots);

// What follows from `slots`, as row_slots() makes them: order[i] becomes the entry that is sent as row i, so that its
// token is order[i] ÷ k. order: [rows.sent].
void row_order(const RankDispatch& rows, std::span<const std::int32_t> slots, RankDispatchWorkspace& workspace,
               std::span<std::int32_t> order);

}  // namespace foremoe
