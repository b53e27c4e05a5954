#pragma once

// The ranks of one expert-parallel group and their nodes: rank r is on node r / ranks_per_node. The last node may have
// fewer ranks.

#include <algorithm>

#include "foremoe/core/ids.h"

namespace foremoe {

// Ranks [first, last).
struct RankRange {
  int first = 0;
  int last = 0;

  int size() const { return last - first; }
};

struct Topology {
  int num_ranks = 1;
  int ranks_per_node = 1;

  int num_nodes() const { return (num_ranks + ranks_per_node - 1) / ranks_per_node; }
  NodeId node_of(RankId r) const { return NodeId{r.value / ranks_per_node}; }
  RankRange ranks_of(NodeId n) const {
    return {n.value * ranks_per_node, std::min((n.value + 1) * ranks_per_node, num_ranks)};
  }
  bool same_node(RankId a, RankId b) const { return node_of(a) == node_of(b); }
};

}  // namespace foremoe
