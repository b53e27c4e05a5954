#include "foremoe/policy/finemoe/token_routing.h"

#include <algorithm>

namespace foremoe::finemoe {

namespace {

struct Sweep {
  std::vector<std::int64_t> input;                        // [source], tokens of the expert left
  std::vector<std::pair<RankId, std::int64_t>> replicas;  // rank ascending, tokens left

  template <class Reaches>
  void run(ExpertId e, const Reaches& reaches, std::vector<Shipment>& shipments) {
    for (std::size_t g = 0; g < input.size(); ++g) {
      const RankId source{g};
      for (auto& [rank, left] : replicas) {
        if (!reaches(source, rank)) continue;
        const std::int64_t tokens = std::min(input[g], left);
        if (tokens == 0) continue;
        shipments.push_back({.expert = e, .source = source, .replica = rank, .rows = Tokens{tokens}});
        input[g] -= tokens;
        left -= tokens;
      }
    }
  }
};

}  // namespace

std::vector<Shipment> route_by_algorithm_1(const RoutingProblem& problem, Locality locality) {
  std::vector<Shipment> shipments;
  const auto& [slot_expert, slot_tokens] = problem.quotas;
  for (int e = 0; e < static_cast<int>(problem.load.extent(1)); ++e) {
    Sweep sweep;
    for (std::size_t r = 0; r < problem.load.extent(0); ++r) {
      sweep.input.push_back(problem.load(r, e).value);
      const auto held = std::ranges::find(slot_expert.row(r), ExpertId{e});
      if (held == slot_expert.row(r).end()) continue;
      sweep.replicas.emplace_back(r, slot_tokens(r, held - slot_expert.row(r).begin()).value);
    }
    if (locality != Locality::kNone) sweep.run(ExpertId{e}, std::equal_to<>{}, shipments);
    if (locality == Locality::kNode) {
      sweep.run(
          ExpertId{e}, [&](RankId a, RankId b) { return problem.topology.same_node(a, b); }, shipments);
    }
    sweep.run(
        ExpertId{e}, [](RankId, RankId) { return true; }, shipments);
  }
  return shipments;
}

CommunicationVolume communication_volume(std::span<const Shipment> shipments, const Topology& topology) {
  std::vector<std::int64_t> rank_sends(topology.num_ranks);
  std::vector<std::int64_t> rank_receives(topology.num_ranks);
  std::vector<std::int64_t> node_sends(topology.num_nodes());
  std::vector<std::int64_t> node_receives(topology.num_nodes());
  for (const Shipment& s : shipments) {
    if (s.source == s.replica) continue;
    rank_sends[s.source.index()] += s.rows.value;
    rank_receives[s.replica.index()] += s.rows.value;
    if (topology.same_node(s.source, s.replica)) continue;
    node_sends[topology.node_of(s.source).index()] += s.rows.value;
    node_receives[topology.node_of(s.replica).index()] += s.rows.value;
  }
  return {.ranks = std::max(std::ranges::max(rank_sends), std::ranges::max(rank_receives)),
          .nodes = std::max(std::ranges::max(node_sends), std::ranges::max(node_receives))};
}

}  // namespace foremoe::finemoe
