#pragma once

// Tokens of one layer as sets of experts, and what homes cost them.
//
// Under dispatch by token, a rank sends a token once to each node that is home to any of its experts. A *pair* is a
// (token, node) with a node other than the token's own, so pairs count the rows that cross between nodes.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/ids.h"
#include "foremoe/rollout/batching.h"

namespace foremoe {

struct TokenSets {
  int num_experts = 0;
  int top_k = 0;
  std::vector<ExpertId> experts;  // [token][k], distinct, then kUnassigned if the token has fewer
  std::vector<NodeId> source;     // [token], node of the rank that processes it

  std::size_t size() const { return source.size(); }
  std::int64_t num_assignments() const { return std::ssize(experts) - std::ranges::count(experts, kUnassigned); }
  std::span<const ExpertId> token(std::size_t t) const {
    const std::span entries = std::span(experts).subspan(t * top_k, top_k);
    return entries.first(static_cast<std::size_t>(std::ranges::find(entries, kUnassigned) - entries.begin()));
  }
};

// Appends the tokens of these sequences that have a route in the layer. `sets` has the trace's experts and top_k.
// Throws InputError for a malformed row.
void append_tokens(const BatchedTrace& batched, std::span<const int> sequences, LayerId layer, TokenSets& sets);

// Keeps at most `most` tokens, evenly spaced.
void thin(TokenSets& sets, std::size_t most);

// Costs of the homes of one layer, or their sums over layers.
struct HomeCosts {
  std::int64_t tokens = 0;              // with a route
  std::int64_t assignments = 0;         // token–expert assignments
  std::int64_t pairs = 0;               // (token, node) with a node other than the token's own
  std::int64_t busiest_node = 0;        // assignments at the experts of the busiest node
  std::int64_t busiest_rank = 0;        // assignments at the experts of the busiest rank
  std::int64_t busiest_node_pairs = 0;  // pairs of the node that receives the most

  HomeCosts& operator+=(const HomeCosts& other);
  friend bool operator==(const HomeCosts&, const HomeCosts&) = default;
};

// home: [expert].
HomeCosts costs_of(std::span<const RankId> home, const TokenSets& sets, Topology topology);

}  // namespace foremoe
