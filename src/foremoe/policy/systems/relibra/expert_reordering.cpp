#include "foremoe/policy/systems/relibra/expert_reordering.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <utility>

#include "foremoe/core/random.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe::relibra {

namespace {

// Maximum over nodes of each term of the cost, in one micro-step.
struct Slowest {
  double compute = 0;
  double link = 0;

  void include(std::int64_t served, std::int64_t linked, double ranks) {
    compute = std::max(compute, static_cast<double>(served) / ranks);
    link = std::max(link, static_cast<double>(linked) / ranks);
  }
};

std::vector<int> nodes_of(std::span<const RankId> home, const Topology& topology) {
  std::vector<int> node(home.size());
  std::ranges::transform(home, node.begin(), [&](RankId r) { return topology.node_of(r).value; });
  return node;
}

std::vector<int> anneal(ReorderingCost cost, const ReorderingOptions& options, Random& random) {
  const auto num_experts = cost.node_of_expert().size();
  const std::size_t num_trials = std::min(num_experts * static_cast<std::size_t>(options.trials_per_expert),
                                          static_cast<std::size_t>(options.most_trials));
  double temperature = options.first_temperature * cost.cost();
  const double cooling = std::pow(options.last_temperature / options.first_temperature,
                                  1.0 / static_cast<double>(std::max<std::size_t>(num_trials, 1)));
  double best_cost = cost.cost();
  std::vector<int> best = cost.node_of_expert();
  for (std::size_t trial = 0; trial < num_trials; ++trial, temperature *= cooling) {
    const auto a = static_cast<int>(random.below(num_experts));
    const auto b = static_cast<int>(random.below(num_experts));
    if (cost.node_of_expert()[a] == cost.node_of_expert()[b]) continue;
    const double rise = cost.cost_after_exchange(a, b) - cost.cost();
    if (rise > 0 && random.uniform() >= std::exp(-rise / temperature)) continue;
    cost.exchange(a, b);
    if (cost.cost() < best_cost) {
      best_cost = cost.cost();
      best = cost.node_of_expert();
    }
  }
  assert(std::abs(cost.cost() - cost.cost_from_scratch()) <= 1e-9 * cost.cost());
  return best;
}

}  // namespace

ReorderingCost::ReorderingCost(const LoadTable& load, LayerId layer, std::vector<int> node_of_expert,
                               const ReorderingOptions& options)
    : communication_weight_(options.communication_weight),
      cost_of_move_(options.move_price / load.num_ranks()),
      initial_node_(node_of_expert),
      node_of_expert_(std::move(node_of_expert)) {
  const Topology topology = load.topology();
  const auto num_nodes = static_cast<std::size_t>(topology.num_nodes());
  const std::size_t num_steps = options.batch_totals ? 1 : load.load.extent(0);
  ranks_.resize(num_nodes);
  for (int r = 0; r < topology.num_ranks; ++r) ++ranks_[topology.node_of(RankId{r}).index()];
  from_node_ = Array<std::int64_t, 3>({num_steps, num_nodes, load.load.extent(3)});
  of_expert_ = Array<std::int64_t, 2>({num_steps, load.load.extent(3)});
  sources_of_node_ = Array<std::int64_t, 2>({num_steps, num_nodes});
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    const int step = options.batch_totals ? 0 : m;
    for (int r = 0; r < load.num_ranks(); ++r) {
      const NodeId node = topology.node_of(RankId{r});
      const std::span<const Tokens> tokens = load.load.row(m, layer, r);
      for (std::size_t e = 0; e < tokens.size(); ++e) {
        from_node_(step, node, e) += tokens[e].value;
        of_expert_(step, e) += tokens[e].value;
        sources_of_node_(step, node) += tokens[e].value;
      }
    }
  }
  loads_ = node_loads();
  cost_ = cost_from_scratch();
}

Array<ReorderingCost::NodeLoad, 2> ReorderingCost::node_loads() const {
  Array<NodeLoad, 2> loads(sources_of_node_.shape());
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    for (std::size_t n = 0; n < loads.extent(1); ++n) loads(m, n).sent = sources_of_node_(m, n);
    for (std::size_t e = 0; e < node_of_expert_.size(); ++e) {
      const int node = node_of_expert_[e];
      const std::int64_t own = from_node_(m, node, e);
      loads(m, node).served += of_expert_(m, e);
      loads(m, node).received += of_expert_(m, e) - own;
      loads(m, node).sent -= own;
    }
  }
  return loads;
}

double ReorderingCost::cost_from_scratch() const {
  const Array<NodeLoad, 2> loads = node_loads();
  double cost = 0;
  for (std::size_t e = 0; e < initial_node_.size(); ++e) {
    if (node_of_expert_[e] != initial_node_[e]) cost += cost_of_move_;
  }
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    Slowest slowest;
    for (std::size_t n = 0; n < loads.extent(1); ++n) {
      const NodeLoad& of_node = loads(m, n);
      slowest.include(of_node.served, std::max(of_node.sent, of_node.received), ranks_[n]);
    }
    cost += slowest.compute + communication_weight_ * slowest.link;
  }
  return cost;
}

ReorderingCost::NodeLoad ReorderingCost::after(std::size_t m, const Change& change) const {
  NodeLoad load = loads_(m, change.node);
  const std::int64_t served = of_expert_(m, change.taken) - of_expert_(m, change.given);
  const std::int64_t own = from_node_(m, change.node, change.taken) - from_node_(m, change.node, change.given);
  load.served += served;
  load.received += served - own;
  load.sent -= own;
  return load;
}

int ReorderingCost::moved_by_exchange(int a, int b) const {
  const int node_of_a = node_of_expert_[a];
  const int node_of_b = node_of_expert_[b];
  const auto away = [&](int e, int node) { return node == initial_node_[e] ? 0 : 1; };
  return away(a, node_of_b) - away(a, node_of_a) + away(b, node_of_a) - away(b, node_of_b);
}

double ReorderingCost::cost_after_exchange(int a, int b) const {
  const Change changes[] = {{.node = node_of_expert_[a], .given = a, .taken = b},
                            {.node = node_of_expert_[b], .given = b, .taken = a}};
  double cost = cost_of_move_ * (moved_ + moved_by_exchange(a, b));
  for (std::size_t m = 0; m < loads_.extent(0); ++m) {
    Slowest slowest;
    const std::span<const NodeLoad> before = loads_.row(m);
    for (int n = 0; n < std::ssize(before); ++n) {
      if (n == changes[0].node || n == changes[1].node) continue;
      slowest.include(before[n].served, std::max(before[n].sent, before[n].received), ranks_[n]);
    }
    for (const Change& change : changes) {
      const NodeLoad load = after(m, change);
      slowest.include(load.served, std::max(load.sent, load.received), ranks_[change.node]);
    }
    cost += slowest.compute + communication_weight_ * slowest.link;
  }
  return cost;
}

void ReorderingCost::exchange(int a, int b) {
  cost_ = cost_after_exchange(a, b);
  const Change changes[] = {{.node = node_of_expert_[a], .given = a, .taken = b},
                            {.node = node_of_expert_[b], .given = b, .taken = a}};
  for (std::size_t m = 0; m < loads_.extent(0); ++m) {
    for (const Change& change : changes) loads_(m, change.node) = after(m, change);
  }
  moved_ += moved_by_exchange(a, b);
  std::swap(node_of_expert_[a], node_of_expert_[b]);
}

std::vector<RankId> reorder_experts(const LoadTable& load, LayerId layer, std::span<const RankId> home,
                                    const ReorderingOptions& options, std::uint64_t seed) {
  const Topology topology = load.topology();
  const std::vector<int> before = nodes_of(home, topology);
  Random random(seed);
  const std::vector<int> after = anneal(ReorderingCost(load, layer, before, options), options, random);

  std::vector<RankId> reordered(home.begin(), home.end());
  const std::vector<std::int64_t> tokens = sum_over_micro_steps(layer_load(load, layer));
  std::vector<std::int64_t> of_rank(topology.num_ranks);  // tokens
  std::vector<int> places(topology.num_ranks);            // freed by experts that leave
  std::vector<int> movers;
  for (int e = 0; e < std::ssize(before); ++e) {
    if (after[e] == before[e]) {
      of_rank[home[e].index()] += tokens[e];
    } else {
      ++places[home[e].index()];
      movers.push_back(e);
    }
  }
  std::ranges::stable_sort(movers, std::ranges::greater{}, [&](int e) { return tokens[e]; });
  for (const int e : movers) {
    int lightest = -1;
    for (int r = 0; r < topology.num_ranks; ++r) {
      if (topology.node_of(RankId{r}).value != after[e] || places[r] == 0) continue;
      if (lightest < 0 || of_rank[r] < of_rank[lightest]) lightest = r;
    }
    assert(lightest >= 0);  // a node gains as many experts as it loses
    reordered[e] = RankId{lightest};
    of_rank[lightest] += tokens[e];
    --places[lightest];
  }
  return reordered;
}

}  // namespace foremoe::relibra
