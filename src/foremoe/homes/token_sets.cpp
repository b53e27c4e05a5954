#include "foremoe/homes/token_sets.h"

#include <algorithm>

namespace foremoe {

void append_tokens(const BatchedTrace& batched, std::span<const int> sequences, LayerId layer, TokenSets& sets) {
  const RoutingTrace& trace = batched.trace;
  const Topology topology{batched.batching.num_ranks, batched.batching.ranks_per_node};
  std::vector<ExpertId> route(trace.top_k);
  for (const int s : sequences) {
    const NodeId source = topology.node_of(batched.batching.rank[s]);
    for (std::int64_t t = trace.cu_seqlens[s]; t < trace.cu_seqlens[s + 1]; ++t) {
      trace.route(t, layer, route);
      if (route.front() == kNoExpert) continue;
      std::stable_partition(route.begin(), route.end(), [](ExpertId e) { return e != kUnassigned; });
      sets.experts.insert(sets.experts.end(), route.begin(), route.end());
      sets.source.push_back(source);
    }
  }
}

void thin(TokenSets& sets, std::size_t most) {
  const std::size_t all = sets.size();
  if (all <= most) return;
  for (std::size_t i = 0; i < most; ++i) {
    const std::size_t t = i * all / most;
    std::ranges::copy(sets.token(t), sets.experts.begin() + static_cast<std::ptrdiff_t>(i * sets.top_k));
    sets.source[i] = sets.source[t];
  }
  sets.experts.resize(most * sets.top_k);
  sets.source.resize(most);
}

HomeCosts& HomeCosts::operator+=(const HomeCosts& other) {
  tokens += other.tokens;
  assignments += other.assignments;
  pairs += other.pairs;
  busiest_node += other.busiest_node;
  busiest_rank += other.busiest_rank;
  busiest_node_pairs += other.busiest_node_pairs;
  return *this;
}

HomeCosts costs_of(std::span<const RankId> home, const TokenSets& sets, Topology topology) {
  HomeCosts costs{.tokens = static_cast<std::int64_t>(sets.size()), .assignments = sets.num_assignments()};
  std::vector<std::int64_t> of_rank(topology.num_ranks);
  std::vector<std::int64_t> of_node(topology.num_nodes());
  std::vector<std::int64_t> pairs(topology.num_nodes());
  std::vector<std::size_t> last(topology.num_nodes(), sets.size());  // [node], the last token sent there
  for (std::size_t t = 0; t < sets.size(); ++t) {
    last[sets.source[t].index()] = t;
    for (const ExpertId e : sets.token(t)) {
      const RankId rank = home[e.index()];
      const std::size_t node = topology.node_of(rank).index();
      ++of_rank[rank.index()];
      ++of_node[node];
      if (last[node] == t) continue;
      last[node] = t;
      ++pairs[node];
      ++costs.pairs;
    }
  }
  costs.busiest_rank = std::ranges::max(of_rank);
  costs.busiest_node = std::ranges::max(of_node);
  costs.busiest_node_pairs = std::ranges::max(pairs);
  return costs;
}

}  // namespace foremoe
