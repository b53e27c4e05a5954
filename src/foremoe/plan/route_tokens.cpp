#include "foremoe/plan/route_tokens.h"

#include <algorithm>
#include <cassert>

namespace foremoe {
namespace {

using Replica = RouteWorkspace::Replica;

// Sorts the replicas that have quota by expert, then rank.
void collect_replicas(const LayerQuotas& quotas, std::size_t num_experts, RouteWorkspace& ws) {
  const std::span<const ExpertId> expert_of_slot = quotas.slot_expert.flat();
  const std::span<const Tokens> tokens_of_slot = quotas.slot_tokens.flat();
  const std::size_t slots_per_rank = quotas.slot_expert.extent(1);
  const auto serves = [&](std::size_t s) { return expert_of_slot[s] != kNoExpert && tokens_of_slot[s] > Tokens{0}; };

  ws.first_replica.assign(num_experts + 1, 0);
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    if (serves(s)) ++ws.first_replica[expert_of_slot[s].index() + 1];
  }
  for (std::size_t e = 0; e < num_experts; ++e) ws.first_replica[e + 1] += ws.first_replica[e];

  ws.replicas.resize(ws.first_replica[num_experts]);
  ws.cursor.assign(ws.first_replica.begin(), ws.first_replica.end());
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    if (!serves(s)) continue;
    ws.replicas[ws.cursor[expert_of_slot[s].index()]++] = {RankId{s / slots_per_rank}, tokens_of_slot[s].value};
  }
}

// One expert's sweeps.
struct Sweeper {
  ExpertId expert;
  std::span<std::int64_t> rows_left;  // [ranks]
  std::vector<Shipment>& out;

  // Sources [first, last) to these replicas, both ascending.
  void sweep(int first, int last, std::span<Replica> replicas) const {
    auto replica = replicas.begin();
    for (int s = first; s < last; ++s) {
      while (rows_left[s] > 0) {
        while (replica != replicas.end() && replica->left == 0) ++replica;
        if (replica == replicas.end()) return;
        const std::int64_t rows = std::min(rows_left[s], replica->left);
        out.push_back({expert, RankId{s}, replica->rank, Tokens{rows}});
        rows_left[s] -= rows;
        replica->left -= rows;
      }
    }
  }
};

void route_expert(const Sweeper& sweeper, std::span<Replica> replicas, const Topology& topology) {
  for (Replica& own : replicas) sweeper.sweep(own.rank.value, own.rank.value + 1, {&own, 1});

  for (auto first = replicas.begin(); first != replicas.end();) {
    const NodeId node = topology.node_of(first->rank);
    const auto last =
        std::find_if(first, replicas.end(), [&](const Replica& r) { return topology.node_of(r.rank) != node; });
    const RankRange sources = topology.ranks_of(node);
    sweeper.sweep(sources.first, sources.last, {first, last});
    first = last;
  }

  sweeper.sweep(0, topology.num_ranks, replicas);  // whoever still has rows has no quota left on its node
}

// Stable: within a source the order of experts and sweeps stays.
void sort_by_source(std::span<const Shipment> shipments, std::size_t num_ranks, RouteWorkspace& ws,
                    RoutedLayer& routed) {
  routed.first.assign(num_ranks + 1, 0);
  for (const Shipment& s : shipments) ++routed.first[s.source.index() + 1];
  for (std::size_t r = 0; r < num_ranks; ++r) routed.first[r + 1] += routed.first[r];
  routed.shipments.resize(shipments.size());
  ws.cursor.assign(routed.first.begin(), routed.first.end());
  for (const Shipment& s : shipments) routed.shipments[ws.cursor[s.source.index()]++] = s;
}

}  // namespace

LayerQuotas layer_quotas(const StepPlan& plan, EventId event, LayerId layer) {
  return {plan.slot_expert[event][layer], plan.slot_tokens[event][layer]};
}

void route_tokens(const RoutingProblem& problem, RouteWorkspace& ws, RoutedLayer& routed) {
  const std::size_t num_ranks = problem.load.extent(0);
  const std::size_t num_experts = problem.load.extent(1);
  assert(problem.quotas.slot_expert.extent(0) == num_ranks);
  collect_replicas(problem.quotas, num_experts, ws);

  ws.by_expert.clear();
  ws.rows_left.resize(num_ranks);
  for (std::size_t e = 0; e < num_experts; ++e) {
    for (std::size_t s = 0; s < num_ranks; ++s) ws.rows_left[s] = problem.load(s, e).value;
    const std::span replicas =
        std::span(ws.replicas).subspan(ws.first_replica[e], ws.first_replica[e + 1] - ws.first_replica[e]);
    route_expert({ExpertId{e}, ws.rows_left, ws.by_expert}, replicas, problem.topology);
    assert(std::ranges::all_of(ws.rows_left, [](std::int64_t left) { return left == 0; }));
    assert(std::ranges::all_of(replicas, [](const Replica& r) { return r.left == 0; }));
  }
  sort_by_source(ws.by_expert, num_ranks, ws, routed);
}

RoutedLayer route_tokens(const RoutingProblem& problem) {
  RouteWorkspace workspace;
  RoutedLayer routed;
  route_tokens(problem, workspace, routed);
  return routed;
}

void assign_rows(const RoutedLayer& routed, const SourceRows& rows, RouteWorkspace& ws, std::span<RankId> replica) {
  assert(replica.size() == rows.routes.size());
  const std::span<const Shipment> shipments = routed.of_source(rows.source);

  // Per expert: the shipment that its next row joins, and how many rows that one still takes.
  const std::size_t num_experts = shipments.empty() ? 0 : shipments.back().expert.index() + 1;
  ws.cursor.assign(num_experts, shipments.size());
  ws.rows_left.assign(num_experts, 0);
  for (std::size_t i = shipments.size(); i-- > 0;) {
    ws.cursor[shipments[i].expert.index()] = i;
    ws.rows_left[shipments[i].expert.index()] = shipments[i].rows.value;
  }

  for (std::size_t row = 0; row < rows.routes.size(); ++row) {
    const ExpertId e = rows.routes[row];
    if (e < ExpertId{0}) {
      replica[row] = kNoReplica;
      continue;
    }
    assert(e.index() < num_experts);
    std::size_t& at = ws.cursor[e.index()];
    std::int64_t& left = ws.rows_left[e.index()];
    if (left == 0) {
      ++at;
      assert(at < shipments.size() && shipments[at].expert == e);
      left = shipments[at].rows.value;
    }
    replica[row] = shipments[at].replica;
    --left;
  }
}

}  // namespace foremoe
