#pragma once

// How many rows each rank sends and receives in one layer's exchange: the sums of the dispatch table of route_tokens
// (plan/route_tokens.h), without its shipments.
//
// Method. An expert's first two sweeps concern only the nodes that hold it; what a source then still has goes to other
//   nodes, and what a replica then still lacks comes from them. The third sweep only has to tell which node sends to
//   which, and sources ascending are nodes ascending.
// Where tokens are sent, not rows, a token crosses to a node once, to the rank there with its source's place on the
//   node, and from there to each rank that serves it, once.
// Complexity. O(ranks · experts + experts · nodes + replicas · ranks of a node).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/array.h"
#include "foremoe/plan/route_tokens.h"

namespace foremoe {

struct LayerRows {
  std::vector<RankRows> ranks;            // [rank], of the dispatch; in the combine sent and received change places
  Array<std::int64_t, 2> between_nodes;   // [from][to], of the dispatch
  std::vector<std::int64_t> assignments;  // [source rank], that it holds
};

// Scratch memory, reused so that a warm call allocates nothing.
struct RowWorkspace {
  struct Replica {
    RankId rank;
    std::int64_t left = 0;
  };
  std::vector<std::vector<Replica>> replicas;  // [expert], with quota, by rank
  Array<std::int64_t, 2> node_load;            // [node][expert]
  std::vector<std::int64_t> kept;              // [source rank], rows that stay on their node
  std::vector<std::int64_t> rows_left;         // [rank of a node]
};

// Throws InputError (field "slot_tokens", index [expert]) when an expert's quotas do not sum to its load.
void count_rows(const RoutingProblem& problem, RowWorkspace& workspace, LayerRows& rows);

// The same of tokens, by a table of them that was counted or is expected.
void count_token_rows(const RoutingProblem& problem, const TokenDispatch& dispatch, LayerRows& rows);

}  // namespace foremoe
