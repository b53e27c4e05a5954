#include "foremoe/policy/inside_first.h"

#include <algorithm>
#include <cassert>

namespace foremoe {

namespace {

// A rank that holds at least one replica of an expert.
struct Holder {
  int rank = 0;
  int replicas = 0;
};

// Returns [expert][holder], ranks ascending.
std::vector<std::vector<Holder>> holders_of(ArrayView<const ExpertId, 2> layout, std::size_t num_experts) {
  std::vector<std::vector<Holder>> holders(num_experts);
  for (int r = 0; r < static_cast<int>(layout.extent(0)); ++r) {
    for (const ExpertId e : layout.row(r)) {
      if (e == kNoExpert) continue;
      std::vector<Holder>& of_expert = holders[e.index()];
      if (of_expert.empty() || of_expert.back().rank != r) of_expert.push_back({.rank = r, .replicas = 0});
      ++of_expert.back().replicas;
    }
  }
  return holders;
}

}  // namespace

InsideFirstRoutes route_inside_first(ArrayView<const std::int64_t, 2> by_source, ArrayView<const ExpertId, 2> layout,
                                     const Topology& topology) {
  InsideFirstRoutes routed{.served = Array<std::int64_t, 2>(by_source.shape())};
  const auto holders = holders_of(layout, by_source.extent(1));
  for (int source = 0; source < static_cast<int>(by_source.extent(0)); ++source) {
    const NodeId node = topology.node_of(RankId{source});
    for (std::size_t e = 0; e < by_source.extent(1); ++e) {
      const std::int64_t tokens = by_source(source, e);
      if (tokens == 0) continue;
      assert(!holders[e].empty());
      std::int64_t inside = 0;
      std::int64_t everywhere = 0;
      for (const Holder& holder : holders[e]) {
        if (topology.node_of(RankId{holder.rank}) == node) inside += holder.replicas;
        everywhere += holder.replicas;
      }
      const std::int64_t parts = inside > 0 ? inside : everywhere;
      std::int64_t remainder = tokens % parts;
      for (const Holder& holder : holders[e]) {
        const bool is_inside = topology.node_of(RankId{holder.rank}) == node;
        if (inside > 0 && !is_inside) continue;
        const std::int64_t extra = std::min<std::int64_t>(remainder, holder.replicas);
        const std::int64_t share = tokens / parts * holder.replicas + extra;
        remainder -= extra;
        routed.served(holder.rank, e) += share;
        if (!is_inside) routed.between_nodes += share;
        if (is_inside && holder.rank != source) routed.inside_nodes += share;
      }
    }
  }
  return routed;
}

std::function<SplitTokens(LayerId layer)> split_inside_first(const PolicyInput& input,
                                                             const std::vector<Array<ExpertId, 3>>& layouts) {
  return [&input, &layouts](LayerId layer) -> SplitTokens {
    return [&load = input.load, &layout = layouts[layer.index()], layer](
               MicroStepId m, const planner::ReplicaGraph& graph, std::span<const std::int64_t>,
               planner::Assignment& assignment) {
      Array<std::int64_t, 2> by_source({load.load.extent(2), load.load.extent(3)});
      std::ranges::transform(load.load.view()[m][layer].flat(), by_source.flat().begin(),
                             [](Tokens tokens) { return tokens.value; });
      const InsideFirstRoutes routed = route_inside_first(by_source, layout[m], load.topology());
      assignment.quota.assign(graph.num_slots(), 0);
      assignment.rank_load.assign(graph.num_ranks(), 0);
      for (int s = 0; s < graph.num_slots(); ++s) {
        if (graph.expert_in(s) < 0) continue;
        assignment.quota[s] = routed.served(graph.rank_of(s), graph.expert_in(s));
        assignment.rank_load[graph.rank_of(s)] += assignment.quota[s];
      }
    };
  };
}

}  // namespace foremoe
