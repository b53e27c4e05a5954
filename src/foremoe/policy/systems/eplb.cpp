#include "foremoe/policy/systems/eplb.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>
#include <optional>
#include <queue>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

struct Packing {
  std::vector<int> pack;   // [item]
  std::vector<int> place;  // [item], position in its pack
};

// Divides items into packs of equal size: heaviest item first, each into the lightest pack with room.
Packing pack_balanced(std::span<const float> weight, int num_packs) {
  const int num_items = static_cast<int>(weight.size());
  const int items_per_pack = num_items / num_packs;
  Packing packing{.pack = std::vector<int>(num_items), .place = std::vector<int>(num_items)};
  if (items_per_pack == 1) {  // nothing to balance: the reference keeps the items' order
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
  std::vector<int> expert;  // [replica]: every expert once, ascending, then further replicas in order of assignment
  std::vector<int> num_holding;  // [expert], number of replicas
};

// Adds replicas to the expert with the largest load per replica until there are `num_replicas`.
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

// Step 1. Returns experts node by node; the groups of a node are in packing order.
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
  ArrayView<ExpertId, 2> slot_expert;  // [rank of the node][slot], output
  std::span<int> num_replicas;         // [expert], all experts; output for those of the node
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

std::optional<std::string> eplb_shape_error(const EplbShape& shape) {
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

void expect_placeable(const EplbShape& shape, std::size_t num_experts) {
  if (const auto reason = eplb_shape_error(shape)) throw InputError({.field = "num_replicas"}, *reason);
  if (num_experts == static_cast<std::size_t>(shape.num_experts)) return;
  throw InputError({.field = "weight"}, fmt::format("has {} experts, expected {}", num_experts, shape.num_experts));
}

EplbPlacement eplb_rebalance(ArrayView<const std::int64_t, 2> weight, const EplbShape& shape) {
  expect_placeable(shape, weight.extent(1));
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

namespace {

EplbShape shape_of(const PolicyInput& input, const EplbOptions& options) {
  const LoadTable& load = input.load;
  const bool is_global = options.mode == EplbMode::kGlobal;
  return {.num_experts = load.num_experts(),
          .num_replicas = load.num_experts() + load.num_ranks() * input.options.guest_slots,
          .num_ranks = load.num_ranks(),
          .num_nodes = is_global ? 1 : load.topology().num_nodes(),
          .num_groups = is_global ? 1 : options.num_groups};
}

std::optional<std::string> unsupported(const EplbShape& shape, EplbMode mode, const Topology& topology) {
  const bool divides = shape.num_groups % shape.num_nodes == 0;
  if (mode == EplbMode::kHierarchical && !divides) {
    return fmt::format("{} expert groups cannot be divided among {} nodes, which hierarchical placement requires",
                       shape.num_groups, shape.num_nodes);
  }
  if (divides && shape.num_nodes > 1 && shape.num_ranks % topology.ranks_per_node != 0) {
    return fmt::format("{} ranks do not fill nodes of {}, which hierarchical placement requires", shape.num_ranks,
                       topology.ranks_per_node);
  }
  return eplb_shape_error(shape);
}

// Returns one placement by expected loads: [1][rank][slot].
Array<ExpertId, 3> placed_by(std::span<const std::int64_t> expected, const EplbShape& shape) {
  return eplb_rebalance({expected.data(), {1, expected.size()}}, shape).slot_expert;
}

// Places a layer's replicas: [placement][rank][slot], see FreePolicy::place.
using Place = std::function<Array<ExpertId, 3>(LayerId layer, ArrayView<const std::int64_t, 2> load)>;

class Eplb : public Policy {
 public:
  Eplb(std::string_view name, std::string_view summary, Split split, const EplbOptions& options)
      : name_(name), summary_(summary), split_(split), options_(options) {
    assert(options.num_groups >= 1);
  }

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    if (input.load.load.empty() || input.load.ranks_per_node < 1) expect_valid(input.load, input.load.name);
    const EplbShape shape = shape_of(input, options_);
    const bool is_even = input.load.num_experts() % input.load.num_ranks() == 0;
    if (is_even && input.options.guest_slots >= 0) {  // otherwise plan_freely reports the error
      if (auto reason = unsupported(shape, options_.mode, input.load.topology())) return Skipped{*std::move(reason)};
    }
    return plan_freely({.name = name_, .split = split_, .place = place(input, shape)}, input, pool);
  }

 private:
  virtual Place place(const PolicyInput& input, const EplbShape& shape) const = 0;

  std::string_view name_;
  std::string_view summary_;
  Split split_;
  EplbOptions options_;
};

class EplbOfStep final : public Eplb {
 public:
  using Eplb::Eplb;
  bool plans_ahead(const PolicyInput& input) const override { return input.previous_load == nullptr; }

 private:
  // EPLB accepts any unit, so sums over micro-steps replace means.
  Place place(const PolicyInput& input, const EplbShape& shape) const override {
    return [former = former_load(input), shape](LayerId layer, ArrayView<const std::int64_t, 2> load) {
      return placed_by(sum_over_micro_steps(former ? layer_load(*former, layer).view() : load), shape);
    };
  }
};

class EplbOracle final : public Eplb {
 public:
  using Eplb::Eplb;
  bool plans_ahead(const PolicyInput& /*input*/) const override { return true; }

 private:
  Place place(const PolicyInput&, const EplbShape& shape) const override {
    return [shape](LayerId, ArrayView<const std::int64_t, 2> load) { return eplb_rebalance(load, shape).slot_expert; };
  }
};

// Moving average of one layer's loads. rounded() returns EPLB's input, in units of 2⁻¹⁰ tokens.
class MovingAverage {
 public:
  explicit MovingAverage(double decay) : decay_(decay) {}

  bool empty() const { return average_.empty(); }

  void begin_with_mean(ArrayView<const std::int64_t, 2> load) {
    for (const std::int64_t sum : sum_over_micro_steps(load)) {
      average_.push_back(static_cast<double>(sum) / static_cast<double>(load.extent(0)));
    }
  }

  void see(std::span<const std::int64_t> load) {
    if (empty()) average_.assign(load.begin(), load.end());
    for (std::size_t e = 0; e < load.size(); ++e) {
      average_[e] = decay_ * static_cast<double>(load[e]) + (1 - decay_) * average_[e];
    }
  }

  std::vector<std::int64_t> rounded() const {
    std::vector<std::int64_t> expected(average_.size());
    std::ranges::transform(average_, expected.begin(), [](double a) { return std::llround(a * 1024); });
    return expected;
  }

 private:
  double decay_;
  std::vector<double> average_;  // [expert], tokens; empty before the first load
};

class EplbEma final : public Eplb {
 public:
  EplbEma(std::string_view name, std::string_view summary, const EplbEmaOptions& options)
      : Eplb(name, summary, Split::kEqual, options.placement), options_(options) {
    assert(options.decay > 0 && options.decay <= 1 && options.period >= 1);
  }

  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }

  std::vector<Option> options() override {
    return {
        number_option({.name = "alpha", .help = "Weight of the newest micro-step in the moving average"},
                      options_.decay, {.least = 0, .most = 1, .above = true}),
        integer_option({.name = "period", .help = "Micro-steps between placements"}, options_.period, {1, 1 << 30})};
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<EplbEma>(*this); }

 private:
  Place place(const PolicyInput& input, const EplbShape& shape) const override {
    return [this, former = former_load(input), home = input.home, shape](LayerId layer,
                                                                         ArrayView<const std::int64_t, 2> load) {
      MovingAverage average(options_.decay);
      if (former) average.begin_with_mean(layer_load(*former, layer));
      return replaced(load, average, home.row(layer), shape);
    };
  }

  // Returns [micro_step][rank][slot].
  Array<ExpertId, 3> replaced(ArrayView<const std::int64_t, 2> load, MovingAverage& average,
                              std::span<const RankId> home, const EplbShape& shape) const {
    const auto num_ranks = static_cast<std::size_t>(shape.num_ranks);
    Array<ExpertId, 3> placements({load.extent(0), num_ranks, static_cast<std::size_t>(shape.num_replicas) / num_ranks},
                                  kNoExpert);
    for (std::size_t m = 0; m < load.extent(0); ++m) {
      const auto now = placements.view()[m];
      if (m % static_cast<std::size_t>(options_.period) == 0 && !average.empty()) {
        std::ranges::copy(placed_by(average.rounded(), shape).flat(), now.flat().begin());
      } else if (m > 0) {
        std::ranges::copy(placements.view()[m - 1].flat(), now.flat().begin());
      } else {
        for (std::size_t e = 0; e < home.size(); ++e) *std::ranges::find(now.row(home[e]), kNoExpert) = ExpertId{e};
      }
      average.see(load.row(m));
    }
    return placements;
  }

  EplbEmaOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_eplb(const EplbOptions& options) {
  return std::make_unique<EplbOfStep>("eplb", "EPLB: replicas placed by the step's mean load, equal split",
                                      Split::kEqual, options);
}

std::unique_ptr<Policy> make_eplb_exact(const EplbOptions& options) {
  return std::make_unique<EplbOfStep>("eplb-exact", "EPLB's placement, our exact split", Split::kExact, options);
}

std::unique_ptr<Policy> make_eplb_ema(const EplbEmaOptions& options) {
  return std::make_unique<EplbEma>("eplb-ema", "EPLB every few micro-steps, by a moving average of previous ones",
                                   options);
}

std::unique_ptr<Policy> make_eplb_oracle(const EplbOptions& options) {
  return std::make_unique<EplbOracle>("eplb-oracle", "EPLB in every micro-step, by that micro-step's load, equal split",
                                      Split::kEqual, options);
}

std::unique_ptr<Policy> make_eplb_oracle_exact(const EplbOptions& options) {
  return std::make_unique<EplbOracle>("eplb-oracle-exact", "EPLB's placement in every micro-step, our exact split",
                                      Split::kExact, options);
}

}  // namespace foremoe
