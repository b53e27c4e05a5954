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

  // Blocks of sent rows, each for one replica of one expert: by expert, then in the order in which its rows fill them.
  struct Block {
    ExpertId expert;
    RankId to;
    std::int64_t first = 0;  // sent row
    std::int64_t rows = 0;
  };
  std::vector<Block> blocks;
  std::int64_t sent = 0;  // rows of all blocks
  RankId rank;
  int num_experts = 0;
};

// Scratch memory, reused so that a warm call allocates nothing.
struct RankDispatchWorkspace {
  RouteWorkspace route;
  RoutedRank routed;
  std::vector<std::int64_t> first;    // [slot][source], first received row
  std::vector<std::int64_t> next;     // [rank], next sent row; [expert], rows that its current block still takes
  std::vector<std::size_t> block;     // [expert], the block that its next row joins
  std::vector<std::int32_t> slot_of;  // [expert], of this rank; −1: none
};

// Throws InputError, field `slot_tokens`, where the quotas of an expert are not its load.
void rank_dispatch(const RoutingProblem& problem, RankId rank, RankDispatchWorkspace& workspace, RankDispatch& rows);

// order[i] becomes the entry of `routes` that is sent as row i, so that its token is order[i] ÷ k. `routes` are this
// rank's, [token·k + j]; a negative entry sends nothing. order: [rows.sent]. Throws InputError, field `routes`, when
// they are not those that the load counts.
void row_order(const RankDispatch& rows, std::span<const ExpertId> routes, RankDispatchWorkspace& workspace,
               std::span<std::int32_t> order);

}  // namespace foremoe
