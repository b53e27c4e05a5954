#include "foremoe/policy/eplb_rebalance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <numeric>
#include <queue>
#include <vector>

namespace foremoe {

namespace {

struct Packing {
  std::vector<int> pack;   // [item]
  std::vector<int> place;  // [item], in its pack
};

// Packs of equally many items: the heaviest item first, to the lightest pack with room.
Packing pack_balanced(std::span<const float> weight, int num_packs) {
  const int num_items = static_cast<int>(weight.size());
  const int items_per_pack = num_items / num_packs;
  Packing packing{.pack = std::vector<int>(num_items), .place = std::vector<int>(num_items)};
  if (items_per_pack == 1) {  // there is nothing to balance: the reference keeps the items where they are
    std::iota(packing.pack.begin(), packing.pack.end(), 0);
    return packing;
  }
  std::vector<int> order(num_items);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, [&](int a, int b) { return std::pair{weight[a], a} > std::pair{weight[b], b}; });

  using Pack = std::pair<float, int>;  // weight, number
  std::priority_queue<Pack, std::vector<Pack>, std::greater<>> lightest;
  for (int p = 0; p < num_packs; ++p) lightest.emplace(0.0F, p);
  std::vector<int> num_packed(num_packs);
  for (const int item : order) {
    const auto [pack_weight, pack] = lightest.top();
    lightest.pop();
    packing.pack[item] = pack;
    packing.place[item] = num_packed[pack]++;
    if (num_packed[pack] < items_per_pack) lightest.emplace(pack_weight + weight[item], pack);
  }
  return packing;
}

struct Replication {
  std::vector<int> expert;  // [replica]: every expert once, ascending, then the further replicas as they were given
  std::vector<int> num_holding;  // [expert], replicas
};

// The expert whose replicas serve most gets another one, until there are `num_replicas`.
Replication replicate(std::span<const float> weight, int num_replicas) {
  const int num_experts = static_cast<int>(weight.size());
  Replication replication{.expert = std::vector<int>(num_experts), .num_holding = std::vector<int>(num_experts, 1)};
  std::iota(replication.expert.begin(), replication.expert.end(), 0);

  struct Share {
    float per_replica;
    int expert;
    bool operator<(const Share& o) const {
      return std::pair{per_replica, -expert} < std::pair{o.per_replica, -o.expert};
    }
  };
  std::priority_queue<Share> largest;
  for (int e = 0; e < num_experts; ++e) largest.push({weight[e], e});
  for (int i = num_experts; i < num_replicas; ++i) {
    const int e = largest.top().expert;
    largest.pop();
    replication.expert.push_back(e);
    largest.push({weight[e] / static_cast<float>(++replication.num_holding[e]), e});
  }
  return replication;
}

bool is_hierarchical(const EplbShape& shape) { return shape.num_groups % shape.num_nodes == 0; }

// Step 1. Experts node by node; on a node its groups in the order in which they were packed.
std::vector<int> pack_groups(std::span<const float> weight, int num_groups, int num_nodes) {
  const int group_size = static_cast<int>(weight.size()) / num_groups;
  const int groups_per_node = num_groups / num_nodes;
  std::vector<float> group_weight(num_groups);
  for (std::size_t e = 0; e < weight.size(); ++e) group_weight[e / group_size] += weight[e];
  const Packing groups = pack_balanced(group_weight, num_nodes);
  std::vector<int> experts(weight.size());
  for (int g = 0; g < num_groups; ++g) {
    const int at = groups.pack[g] * groups_per_node + groups.place[g];
    for (int i = 0; i < group_size; ++i) experts[at * group_size + i] = g * group_size + i;
  }
  return experts;
}

// Steps 2 and 3 on one node.
struct Node {
  std::span<const int> experts;        // of the node
  ArrayView<ExpertId, 2> slot_expert;  // [rank of the node][slot], to be filled
  std::span<int> num_replicas;         // [expert], of all; those of the node are set
};

void place_on_node(std::span<const float> weight, const Node& node) {
  std::vector<float> expert_weight;
  for (const int e : node.experts) expert_weight.push_back(weight[e]);
  const Replication replicas = replicate(expert_weight, static_cast<int>(node.slot_expert.size()));
  std::vector<float> replica_weight;
  for (const int i : replicas.expert) {
    replica_weight.push_back(expert_weight[i] / static_cast<float>(replicas.num_holding[i]));
  }
  const Packing ranks = pack_balanced(replica_weight, static_cast<int>(node.slot_expert.extent(0)));
  for (std::size_t i = 0; i < replicas.expert.size(); ++i) {
    node.slot_expert(ranks.pack[i], ranks.place[i]) = ExpertId{node.experts[replicas.expert[i]]};
  }
  for (std::size_t i = 0; i < node.experts.size(); ++i) node.num_replicas[node.experts[i]] = replicas.num_holding[i];
}

}  // namespace

std::optional<std::string> eplb_obstacle(const EplbShape& shape) {
  const auto& [num_experts, num_replicas, num_ranks, num_nodes, num_groups] = shape;
  if (std::min({num_experts, num_replicas, num_ranks, num_nodes, num_groups}) < 1) {
    return "experts, replicas, ranks, nodes and groups must be at least 1";
  }
  const auto uneven = [](int count, std::string_view what, int over, std::string_view whom) {
    return fmt::format("{} {} cannot be spread evenly over {} {}", count, what, over, whom);
  };
  if (num_replicas < num_experts) return fmt::format("{} experts do not fit into {} slots", num_experts, num_replicas);
  if (num_replicas % num_ranks != 0) return uneven(num_replicas, "replicas", num_ranks, "ranks");
  if (is_hierarchical(shape) && num_experts % num_groups != 0)
    return uneven(num_experts, "experts", num_groups, "groups");
  if (is_hierarchical(shape) && num_ranks % num_nodes != 0) return uneven(num_ranks, "ranks", num_nodes, "nodes");
  return std::nullopt;
}

EplbPlacement eplb_rebalance(ArrayView<const std::int64_t, 2> weight, const EplbShape& shape) {
  assert(!eplb_obstacle(shape) && weight.extent(1) == static_cast<std::size_t>(shape.num_experts));
  const int num_nodes = is_hierarchical(shape) ? shape.num_nodes : 1;
  const int num_groups = is_hierarchical(shape) ? shape.num_groups : 1;
  const auto ranks_per_node = static_cast<std::size_t>(shape.num_ranks / num_nodes);
  const auto slots_per_rank = static_cast<std::size_t>(shape.num_replicas / shape.num_ranks);
  const auto experts_per_node = static_cast<std::size_t>(shape.num_experts / num_nodes);

  EplbPlacement placement;
  placement.slot_expert =
      Array<ExpertId, 3>({weight.extent(0), static_cast<std::size_t>(shape.num_ranks), slots_per_rank});
  placement.num_replicas = Array<int, 2>(weight.shape());
  for (std::size_t l = 0; l < weight.extent(0); ++l) {
    const std::vector<float> layer_weight(weight.row(l).begin(), weight.row(l).end());
    const std::vector<int> experts = pack_groups(layer_weight, num_groups, num_nodes);
    for (int n = 0; n < num_nodes; ++n) {
      ExpertId* const first_slot = placement.slot_expert.row(l, n * ranks_per_node).data();
      place_on_node(layer_weight, {.experts = std::span(experts).subspan(n * experts_per_node, experts_per_node),
                                   .slot_expert = {first_slot, {ranks_per_node, slots_per_rank}},
                                   .num_replicas = placement.num_replicas.row(l)});
    }
  }
  return placement;
}

}  // namespace foremoe
