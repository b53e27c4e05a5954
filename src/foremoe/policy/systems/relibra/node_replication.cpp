#include "foremoe/policy/systems/relibra/node_replication.h"

#include <algorithm>
#include <numeric>

namespace foremoe::relibra {

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

// Returns a rank's lowest empty slot, or −1. Home slots come first and are full, so it is a guest slot.
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
  kLevel,  // the receiver gets a new replica and does not exceed the giver
};

// Returns the move that relieves a rank most, with 0 tokens if there is none.
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

// Repeatedly relieves the most loaded rank, until it is at the mean or cannot be relieved.
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

// Adds one replica for the first of the most loaded ranks that a new replica relieves. Returns false if there is none.
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
