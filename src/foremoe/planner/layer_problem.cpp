#include "foremoe/planner/layer_problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace foremoe::planner {

static void add_loads(const LoadTable& table, LayerId layer, LayerProblem& p) {
  const int num_nodes = p.topology.num_nodes();
  if (num_nodes > 1) {
    p.node_load =
        Array<std::int64_t, 3>({static_cast<std::size_t>(p.num_micro_steps), static_cast<std::size_t>(p.num_experts),
                                static_cast<std::size_t>(num_nodes)});
  }
  for (int m = 0; m < p.num_micro_steps; ++m) {
    const auto total = p.expert_load.row(m);
    for (int r = 0; r < p.num_ranks(); ++r) {
      const auto load = table.load.row(m, layer, r);
      const auto node = p.topology.node_of(RankId{r});
      for (int e = 0; e < p.num_experts; ++e) {
        total[e] += load[e].value;
        if (num_nodes > 1) p.node_load(m, e, node) += load[e].value;
      }
    }
  }
}

LayerProblem make_layer_problem(const LoadTable& table, LayerId layer, std::span<const RankId> home,
                                const PlannerOptions& options) {
  LayerProblem p;
  p.num_micro_steps = table.num_micro_steps();
  p.num_experts = table.num_experts();
  p.guest_slots = options.guest_slots;
  p.topology = table.topology();
  const auto micro_steps = static_cast<std::size_t>(p.num_micro_steps);
  p.expert_load = Array<std::int64_t, 2>({micro_steps, static_cast<std::size_t>(p.num_experts)});
  add_loads(table, layer, p);

  const double tolerance = options.tolerance.value_or(default_tolerance(options.residency));
  const auto ranks = static_cast<std::int64_t>(p.num_ranks());
  for (int m = 0; m < p.num_micro_steps; ++m) {
    const auto load = p.load(m);
    const std::int64_t total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
    const double mean = static_cast<double>(total) / static_cast<double>(ranks);
    p.lower_bound.push_back((total + ranks - 1) / ranks);
    p.target.push_back(std::max(p.lower_bound.back(), static_cast<std::int64_t>(std::floor((1.0 + tolerance) * mean))));
    p.per_mean.push_back(total > 0 ? static_cast<float>(1.0 / mean) : 0.0F);
  }
  std::vector<int> ranks_of(home.size());
  std::transform(home.begin(), home.end(), ranks_of.begin(), [](RankId r) { return r.value; });
  set_homes(p, ranks_of);
  return p;
}

void set_homes(LayerProblem& p, std::span<const int> home) {
  p.home.assign(home.begin(), home.end());
  p.home_slot.resize(home.size());
  std::vector<int> filled(p.num_ranks(), 0);
  for (int e = 0; e < p.num_experts; ++e) p.home_slot[e] = home[e] * p.slots_per_rank() + filled[home[e]]++;
  const auto micro_steps = static_cast<std::size_t>(p.num_micro_steps);
  p.surplus = Array<float, 2>({micro_steps, static_cast<std::size_t>(p.num_experts)});
  p.room = Array<float, 2>({micro_steps, static_cast<std::size_t>(p.num_ranks())});
  std::vector<std::int64_t> rank_load(p.num_ranks());
  for (int m = 0; m < p.num_micro_steps; ++m) {
    const auto load = p.load(m);
    std::fill(rank_load.begin(), rank_load.end(), 0);
    for (int e = 0; e < p.num_experts; ++e) rank_load[p.home[e]] += load[e];
    for (int e = 0; e < p.num_experts; ++e) {
      const std::int64_t excess = std::max<std::int64_t>(0, rank_load[p.home[e]] - p.target[m]);
      p.surplus(m, e) = static_cast<float>(std::min(load[e], excess)) * p.per_mean[m];
    }
    for (int r = 0; r < p.num_ranks(); ++r) {
      p.room(m, r) = static_cast<float>(std::max<std::int64_t>(0, p.target[m] - rank_load[r])) * p.per_mean[m];
    }
  }
}

ReplicaGraph homes_only(const LayerProblem& p) {
  ReplicaGraph graph(p.num_ranks(), p.slots_per_rank(), p.num_experts);
  for (int e = 0; e < p.num_experts; ++e) graph.put(p.home_slot[e], e);
  return graph;
}

void serve_at_homes(const LayerProblem& p, int m, Assignment& a) {
  a.quota.assign(static_cast<std::size_t>(p.num_ranks()) * p.slots_per_rank(), 0);
  a.rank_load.assign(p.num_ranks(), 0);
  const auto load = p.load(m);
  for (int e = 0; e < p.num_experts; ++e) {
    a.quota[p.home_slot[e]] = load[e];
    a.rank_load[p.home[e]] += load[e];
  }
}

void release(const LayerProblem& p, const ReplicaGraph& graph, int slot, Assignment& a) {
  const int e = graph.expert_in(slot);
  const std::int64_t tokens = a.quota[slot];
  a.quota[slot] = 0;
  a.rank_load[graph.rank_of(slot)] -= tokens;
  a.quota[p.home_slot[e]] += tokens;
  a.rank_load[p.home[e]] += tokens;
}

}  // namespace foremoe::planner
