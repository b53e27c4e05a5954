#pragma once

// Node-first routing divides the tokens of a source equally among the replicas on its node, or among all replicas if
// its node has none. LAER-MoE and Galvatron's FlexMoE route this way.
//
// Inferred: the remainder of the division goes to the lowest ranks. Galvatron adds the remainder to parts that already
// include it. Cost: O(ranks · experts · replicas).

#include <cstdint>
#include <functional>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe {

struct InsideFirstRoutes {
  Array<std::int64_t, 2> served;   // [rank][expert], tokens
  std::int64_t inside_nodes = 0;   // tokens sent to another rank of the node
  std::int64_t between_nodes = 0;  // tokens sent to another node
};

// `by_source` is [source rank][expert], tokens. `layout` is [rank][slot]; a rank may hold several replicas of an
// expert. The layout must contain every expert with tokens.
InsideFirstRoutes route_inside_first(ArrayView<const std::int64_t, 2> by_source, ArrayView<const ExpertId, 2> layout,
                                     const Topology& topology);

// Returns a FreePolicy::own_split that calls route_inside_first(). `layouts` is [layer] of [micro_step][rank][slot];
// place() must fill a layer's entry before that layer's tokens are split. Both arguments must outlive the result.
std::function<SplitTokens(LayerId layer)> split_inside_first(const PolicyInput& input,
                                                             const std::vector<Array<ExpertId, 3>>& layouts);

}  // namespace foremoe
