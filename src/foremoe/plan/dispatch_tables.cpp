#include "foremoe/plan/dispatch_tables.h"

#include <algorithm>

namespace foremoe {
namespace {

// Adds one to `row` at each different value of `places`; `places` is sorted on return.
template <class Id>
void count_distinct(std::vector<Id>& places, std::span<Tokens> row) {
  std::ranges::sort(places);
  const auto last = std::unique(places.begin(), places.end());
  for (auto place = places.begin(); place != last; ++place) row[place->index()] += Tokens{1};
}

}  // namespace

Array<Tokens, 2> dispatch_table(const RoutedLayer& routed) {
  const std::size_t num_ranks = routed.first.size() - 1;
  Array<Tokens, 2> rows({num_ranks, num_ranks});
  for (const Shipment& s : routed.shipments) rows(s.source, s.replica) += s.rows;
  return rows;
}

TokenDispatch token_dispatch(const RoutedLayer& routed, const TokenDispatchProblem& problem) {
  const Topology& topology = problem.topology;
  const std::size_t num_ranks = static_cast<std::size_t>(topology.num_ranks);
  const std::size_t num_nodes = static_cast<std::size_t>(topology.num_nodes());
  const std::size_t top_k = static_cast<std::size_t>(problem.tokens.top_k());
  TokenDispatch table{.to_rank = Array<Tokens, 2>({num_ranks, num_ranks}),
                      .to_node = Array<Tokens, 2>({num_ranks, num_nodes})};

  RouteWorkspace workspace;
  std::vector<ExpertId> routes;  // [token][k]
  std::vector<RankId> replica;   // [token][k]
  std::vector<RankId> ranks;     // of one token
  std::vector<NodeId> nodes;     // of one token
  for (int s = 0; s < topology.num_ranks; ++s) {
    problem.tokens.gather(problem.micro_step, RankId{s}, problem.layer, routes);
    replica.resize(routes.size());
    assign_rows(routed, {RankId{s}, routes}, workspace, replica);
    for (std::size_t token = 0; token < replica.size(); token += top_k) {
      ranks.clear();
      nodes.clear();
      for (const RankId r : std::span(replica).subspan(token, top_k)) {
        if (r == kNoReplica) continue;
        ranks.push_back(r);
        nodes.push_back(topology.node_of(r));
      }
      count_distinct(ranks, table.to_rank.row(s));
      count_distinct(nodes, table.to_node.row(s));
    }
  }
  return table;
}

}  // namespace foremoe
