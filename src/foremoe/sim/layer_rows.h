#pragma once

// Counts the rows that each rank sends and receives in one layer's exchange. The counts are the sums of route_tokens'
// dispatch table (plan/route_tokens.h), without its shipments.
//
// Method. The first two sweeps over an expert visit only nodes with its replicas. Rows that remain at a source go to
//   other nodes and fill the remaining quotas of the replicas there. The third sweep only determines the sending and
//   receiving nodes, since ascending sources are ascending nodes.
// Dispatch by token. A token is sent once to each other node that serves it. The receiver is the rank with the source's
//   local index, which forwards the token once to each serving rank.
// Complexity. O(ranks · experts + experts · nodes + replicas · ranks of a node).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/array.h"
#include "foremoe/plan/assign_rows.h"

namespace foremoe {

struct LayerRows {
  std::vector<RankRows> ranks;            // [rank], of the dispatch; the combine swaps sent and received
  Array<std::int64_t, 2> between_nodes;   // [from][to], of the dispatch
  std::vector<std::int64_t> assignments;  // [source rank], assignments of its tokens
};

// Scratch memory, reused so that a warm call allocates nothing.
struct RowWorkspace {
  struct Replica {
    RankId rank;
    std::int64_t left = 0;
  };
  std::vector<std::vector<Replica>> replicas;  // [expert], those with quota, by rank
  Array<std::int64_t, 2> node_load;            // [node][expert]
  std::vector<std::int64_t> kept;              // [source rank], rows that stay on their node
  std::vector<std::int64_t> rows_left;         // [rank of a node]
  std::vector<std::int64_t> share;             // [rank of a node]
  std::vector<std::int64_t> carry;             // [rank], of divide_fairly()
};

// Throws InputError (field "slot_tokens", index [expert]) if an expert's quotas do not sum to its load.
void count_rows(const RoutingProblem& problem, RowWorkspace& workspace, LayerRows& rows);

// Like the function above, for dispatch by token, from a counted or expected table of tokens.
void count_token_rows(const RoutingProblem& problem, const TokenDispatch& dispatch, LayerRows& rows);

}  // namespace foremoe
