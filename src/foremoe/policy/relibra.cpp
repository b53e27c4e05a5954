#include "foremoe/policy/relibra.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>

#include "foremoe/core/random.h"
#include "foremoe/core/timeline.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe::relibra {

namespace {

// The largest over nodes of both parts of the cost, in one micro-step.
struct Slowest {
  double compute = 0;
  double link = 0;

  void meet(std::int64_t served, std::int64_t linked, double ranks) {
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
    : communication_weight_(options.communication_weight), node_of_expert_(std::move(node_of_expert)) {
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
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    Slowest slowest;
    for (std::size_t n = 0; n < loads.extent(1); ++n) {
      const NodeLoad& of_node = loads(m, n);
      slowest.meet(of_node.served, std::max(of_node.sent, of_node.received), ranks_[n]);
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

double ReorderingCost::cost_after_exchange(int a, int b) const {
  const Change changes[] = {{.node = node_of_expert_[a], .given = a, .taken = b},
                            {.node = node_of_expert_[b], .given = b, .taken = a}};
  double cost = 0;
  for (std::size_t m = 0; m < loads_.extent(0); ++m) {
    Slowest slowest;
    const std::span<const NodeLoad> before = loads_.row(m);
    for (int n = 0; n < std::ssize(before); ++n) {
      if (n == changes[0].node || n == changes[1].node) continue;
      slowest.meet(before[n].served, std::max(before[n].sent, before[n].received), ranks_[n]);
    }
    for (const Change& change : changes) {
      const NodeLoad load = after(m, change);
      slowest.meet(load.served, std::max(load.sent, load.received), ranks_[change.node]);
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
  std::vector<int> places(topology.num_ranks);            // left by those that go
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
    assert(lightest >= 0);  // as many came to a node as left it
    reordered[e] = RankId{lightest};
    of_rank[lightest] += tokens[e];
    --places[lightest];
  }
  return reordered;
}

namespace {

using planner::ReplicaGraph;

std::int64_t mean_of(const NodeLoad& node) {  // rounded up
  const std::int64_t total = std::accumulate(node.load.begin(), node.load.end(), std::int64_t{0});
  return (total + node.num_ranks - 1) / node.num_ranks;
}

NodeReplicas at_home(const NodeLoad& node) {
  const int num_experts = static_cast<int>(node.home.size());
  NodeReplicas replicas{
      .graph = ReplicaGraph(node.num_ranks, num_experts / node.num_ranks + node.guest_slots, num_experts),
      .assignment = {}};
  replicas.assignment.quota.resize(replicas.graph.num_slots());
  replicas.assignment.rank_load.resize(node.num_ranks);
  std::vector<int> next_slot(node.num_ranks);
  for (int e = 0; e < num_experts; ++e) {
    const int rank = node.home[e];
    const int slot = replicas.graph.first_slot(rank) + next_slot[rank]++;
    replicas.graph.put(slot, e);
    replicas.assignment.quota[slot] = node.load[e];
    replicas.assignment.rank_load[rank] += node.load[e];
  }
  return replicas;
}

// The lowest empty slot of a rank, or −1. Homes come first, so that it is a guest slot.
int free_slot(const ReplicaGraph& graph, int rank) {
  for (int s = graph.first_slot(rank); s < graph.first_slot(rank) + graph.slots_per_rank(); ++s) {
    if (graph.expert_in(s) < 0) return s;
  }
  return -1;
}

struct Increment {
  std::int64_t tokens = 0;
  int from = -1;  // slot
  int to = -1;    // slot, of the same expert or empty
  bool is_new = false;
};

enum class Until : std::uint8_t {
  kMean,   // neither rank passes the mean
  kLevel,  // the receiving rank does not pass the giving one, which gets a new replica for it
};

// The best way to relieve a rank, with 0 tokens when there is none.
Increment best_increment(const NodeReplicas& replicas, int rank, std::int64_t mean, Until until) {
  const ReplicaGraph& graph = replicas.graph;
  const planner::Assignment& assignment = replicas.assignment;
  std::vector<int> free(graph.num_ranks());
  for (int r = 0; r < graph.num_ranks(); ++r) free[r] = free_slot(graph, r);
  std::vector<int> slots;  // of the rank, experts ascending
  for (int s = graph.first_slot(rank); s < graph.first_slot(rank) + graph.slots_per_rank(); ++s) {
    if (graph.expert_in(s) >= 0 && assignment.quota[s] > 0) slots.push_back(s);
  }
  std::ranges::sort(slots, {}, [&](int s) { return graph.expert_in(s); });

  const std::vector<std::int64_t>& load = assignment.rank_load;
  Increment best;
  for (const int s : slots) {
    for (int r = 0; r < graph.num_ranks(); ++r) {
      const std::int64_t room =
          until == Until::kMean ? std::min(load[rank] - mean, mean - load[r]) : (load[rank] - load[r]) / 2;
      const std::int64_t tokens = std::min(assignment.quota[s], room);
      if (tokens <= 0 || tokens < best.tokens) continue;
      const int held = graph.find(graph.expert_in(s), r);
      const int to = held >= 0 ? held : free[r];
      const bool is_new = held < 0;
      if (to < 0 || (until == Until::kLevel && !is_new)) continue;
      if (tokens == best.tokens && (is_new || !best.is_new)) continue;
      best = {.tokens = tokens, .from = s, .to = to, .is_new = is_new};
    }
  }
  return best;
}

void apply(const Increment& increment, NodeReplicas& replicas) {
  auto& [graph, assignment] = replicas;
  if (increment.is_new) graph.put(increment.to, graph.expert_in(increment.from));
  assignment.quota[increment.from] -= increment.tokens;
  assignment.quota[increment.to] += increment.tokens;
  assignment.rank_load[graph.rank_of(increment.from)] -= increment.tokens;
  assignment.rank_load[graph.rank_of(increment.to)] += increment.tokens;
}

// Relieves the most loaded rank until it is at the mean or cannot be relieved.
void fill_to_mean(std::int64_t mean, NodeReplicas& replicas) {
  const std::vector<std::int64_t>& load = replicas.assignment.rank_load;
  while (true) {
    const auto rank = static_cast<int>(std::ranges::max_element(load) - load.begin());
    if (load[rank] <= mean) return;
    const Increment increment = best_increment(replicas, rank, mean, Until::kMean);
    if (increment.tokens == 0) return;
    apply(increment, replicas);
  }
}

// One new replica for the first of the most loaded ranks that can be relieved by one. False when none can.
bool level_once(std::int64_t mean, NodeReplicas& replicas) {
  const std::vector<std::int64_t>& load = replicas.assignment.rank_load;
  const std::int64_t largest = std::ranges::max(load);
  for (int r = 0; r < std::ssize(load); ++r) {
    if (load[r] < largest) continue;
    const Increment increment = best_increment(replicas, r, mean, Until::kLevel);
    if (increment.tokens == 0) continue;
    apply(increment, replicas);
    return true;
  }
  return false;
}

}  // namespace

NodeReplicas replicate_in_node(const NodeLoad& node, planner::AssignmentSearch& search) {
  NodeReplicas replicas = at_home(node);
  const std::int64_t mean = mean_of(node);
  do {
    fill_to_mean(mean, replicas);
  } while (planner::assign_tokens(replicas.graph, mean, replicas.assignment, search) > mean &&
           level_once(mean, replicas));
  return replicas;
}

}  // namespace foremoe::relibra

namespace foremoe {

namespace {

// Replicas of one layer, node by node.
class LayerReplication {
 public:
  void choose(const LayerLoad& of, std::vector<Share>& shares) {
    for (int n = 0; n < of.topology.num_nodes(); ++n) {
      gather(of, NodeId{n});
      const relibra::NodeReplicas replicas = relibra::replicate_in_node(node_, search_);
      const int first_rank = of.topology.ranks_of(NodeId{n}).first;
      for (int s = 0; s < replicas.graph.num_slots(); ++s) {
        const int e = replicas.graph.expert_in(s);
        const int rank = replicas.graph.rank_of(s);
        if (e < 0 || rank == node_.home[e] || replicas.assignment.quota[s] == 0) continue;
        shares.push_back({experts_[e], RankId{first_rank + rank}, replicas.assignment.quota[s]});
      }
    }
  }

 private:
  void gather(const LayerLoad& of, NodeId node) {
    const RankRange ranks = of.topology.ranks_of(node);
    node_.num_ranks = ranks.size();
    node_.guest_slots = of.guest_slots;
    node_.home.clear();
    node_.load.clear();
    experts_.clear();
    for (int e = 0; e < std::ssize(of.home); ++e) {
      if (of.topology.node_of(of.home[e]) != node) continue;
      experts_.push_back(ExpertId{e});
      node_.home.push_back(of.home[e].value - ranks.first);
      node_.load.push_back(of.of_expert[e]);
    }
  }

  relibra::NodeLoad node_;
  std::vector<ExpertId> experts_;  // of node_
  planner::AssignmentSearch search_;
};

class Relibra final : public Policy {
 public:
  explicit Relibra(const RelibraOptions& options) : options_(options) {}

  std::string_view name() const override { return "relibra"; }
  std::string_view summary() const override {
    return "ReLibra: homes annealed across nodes once per step, greedy replicas inside them in every micro-step";
  }
  std::span<const std::string_view> uses() const override { return kUses; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    FetchedPolicy policy{.name = name(), .of_layer = [](LayerId) {
                           return [replication = std::make_shared<LayerReplication>()](const LayerLoad& of,
                                                                                       std::vector<Share>& shares) {
                             replication->choose(of, shares);
                           };
                         }};
    const bool is_even = input.load.num_experts() % input.load.num_ranks() == 0;
    if (!options_.reorder || !is_even || input.load.topology().num_nodes() == 1) {
      return plan_fetched(policy, input, pool);
    }

    const auto begin = std::chrono::steady_clock::now();
    check_policy_input(input);
    Array<RankId, 2> home(input.home.shape());
    std::vector<double> cpu_seconds(home.extent(0));  // [layer]
    pool.for_each_index(home.extent(0), [&](std::size_t l, std::size_t) {
      const double layer_begin = thread_cpu_seconds();
      const std::uint64_t seed = input.options.seed + 0x9e3779b97f4a7c15 * (l + 1);  // every layer its own sequence
      std::ranges::copy(relibra::reorder_experts(input.load, LayerId{l}, input.home.row(l), options_.reordering, seed),
                        home.row(l).begin());
      cpu_seconds[l] = thread_cpu_seconds() - layer_begin;
    });
    policy.home = home;
    const double reordering_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    PolicyResult result = plan_fetched(policy, input, pool);
    if (auto* step = std::get_if<PlannedStep>(&result)) {
      step->times.base_cpu_seconds = std::accumulate(cpu_seconds.begin(), cpu_seconds.end(), 0.0);
      step->times.wall_seconds += reordering_seconds;
    }
    return result;
  }

 private:
  static constexpr std::array<std::string_view, 3> kUses{"guest_slots", "in_flight", "seed"};

  RelibraOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_relibra(const RelibraOptions& options) { return std::make_unique<Relibra>(options); }

}  // namespace foremoe
