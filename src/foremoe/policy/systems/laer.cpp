#include "foremoe/policy/systems/laer.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <queue>
#include <set>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/core/random.h"
#include "foremoe/policy/inside_first.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe::laer {

namespace {

// Places replicas on ranks.
class Placing {
 public:
  explicit Placing(const Shape& shape)
      : topology_(shape.topology),
        layout_({static_cast<std::size_t>(shape.topology.num_ranks), static_cast<std::size_t>(shape.slots_per_rank)},
                kNoExpert),
        used_(layout_.extent(0)),
        load_(layout_.extent(0)) {}

  void put(ExpertId expert, int replicas, double load_per_replica) {
    std::vector<int> on_node(topology_.num_nodes());
    for (int i = 0; i < replicas; ++i) {
      const RankId rank = choose(on_node);
      layout_(rank, used_[rank.index()]++) = expert;
      load_[rank.index()] += load_per_replica;
      ++on_node[topology_.node_of(rank).index()];
    }
  }

  Array<ExpertId, 2> layout() && { return std::move(layout_); }

 private:
  RankId choose(const std::vector<int>& on_node) const {
    const int fewest = std::ranges::min(on_node);
    const auto least_loaded = [&](bool on_nodes_with_fewest) {
      int best = -1;
      for (int r = 0; r < topology_.num_ranks; ++r) {
        if (used_[r] == layout_.extent(1)) continue;
        if (on_nodes_with_fewest && on_node[topology_.node_of(RankId{r}).index()] != fewest) continue;
        if (best < 0 || load_[r] < load_[best]) best = r;
      }
      return best;
    };
    const int rank = least_loaded(true);
    return RankId{rank >= 0 ? rank : least_loaded(false)};
  }

  Topology topology_;
  Array<ExpertId, 2> layout_;      // [rank][slot]
  std::vector<std::size_t> used_;  // [rank], slots
  std::vector<double> load_;       // [rank], expected tokens
};

}  // namespace

std::vector<int> heap_replicas(std::span<const std::int64_t> load, const Shape& shape) {
  const int num_slots = shape.topology.num_ranks * shape.slots_per_rank;
  const int num_experts = static_cast<int>(load.size());
  const int num_nodes = shape.topology.num_nodes();
  const int at_first = num_nodes * num_experts <= num_slots ? num_nodes : 1;
  std::vector<int> replicas(load.size(), at_first);
  const auto serves_less = [&](int a, int b) {
    const std::int64_t load_a = load[a] * replicas[b];
    const std::int64_t load_b = load[b] * replicas[a];
    return load_a != load_b ? load_a < load_b : a > b;
  };
  // An expert's replica count changes only while the expert is outside the heap.
  std::priority_queue<int, std::vector<int>, decltype(serves_less)> heap(serves_less);
  for (int e = 0; e < num_experts; ++e) heap.push(e);
  int used = at_first * num_experts;
  while (used < num_slots && !heap.empty()) {
    const int e = heap.top();
    heap.pop();
    const int more = replicas[e] >= num_nodes ? num_nodes : 1;
    if (used + more > num_slots) continue;
    replicas[e] += more;
    used += more;
    heap.push(e);
  }
  return replicas;
}

std::vector<int> even_replicas(std::size_t num_experts, const Shape& shape) {
  const std::size_t num_slots = static_cast<std::size_t>(shape.topology.num_ranks) * shape.slots_per_rank;
  if (num_experts == 0 || num_slots % num_experts != 0) return {};
  std::vector<int> replicas(num_experts, static_cast<int>(num_slots / num_experts));
  return replicas;
}

Array<ExpertId, 2> place_replicas(std::span<const std::int64_t> load, std::span<const int> replicas,
                                  const Shape& shape) {
  assert(std::accumulate(replicas.begin(), replicas.end(), 0) <= shape.topology.num_ranks * shape.slots_per_rank);
  std::vector<int> order(load.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return load[a] * replicas[b] > load[b] * replicas[a]; });
  Placing placing(shape);
  for (const int e : order) {
    placing.put(ExpertId{e}, replicas[e], static_cast<double>(load[e]) / static_cast<double>(replicas[e]));
  }
  return std::move(placing).layout();
}

double seconds_of(const InsideFirstRoutes& routed, const Prices& prices) {
  std::int64_t most = 0;
  for (std::size_t r = 0; r < routed.served.extent(0); ++r) {
    const auto of_rank = routed.served.row(r);
    most = std::max(most, std::accumulate(of_rank.begin(), of_rank.end(), std::int64_t{0}));
  }
  const auto bytes = static_cast<double>(prices.bytes_per_token);
  const double communication =
      bytes * (static_cast<double>(routed.inside_nodes) / prices.bytes_per_second_inside_nodes +
               static_cast<double>(routed.between_nodes) / prices.bytes_per_second_between_nodes);
  const double computation = static_cast<double>(most) * prices.seconds_per_token;
  return 4 * communication + (prices.checkpointing ? 4 : 3) * computation;
}

std::vector<std::vector<int>> perturbed_replicas(std::span<const int> replicas, int count, const Shape& shape) {
  constexpr std::uint64_t kSeed = 2333;
  Random random(kSeed);
  std::set<std::vector<int>> known{{replicas.begin(), replicas.end()}};
  std::vector<std::vector<int>> perturbed;
  for (int i = 0; i < count && replicas.size() > 1; ++i) {
    const std::uint64_t from = random.below(replicas.size());
    const std::uint64_t to = (from + 1 + random.below(replicas.size() - 1)) % replicas.size();
    const int num_nodes = shape.topology.num_nodes();
    const int moved = replicas[from] % num_nodes == 0 && replicas[to] % num_nodes == 0 ? num_nodes : 1;
    if (replicas[from] <= moved) continue;
    std::vector<int> changed(replicas.begin(), replicas.end());
    changed[from] -= moved;
    changed[to] += moved;
    if (known.insert(changed).second) perturbed.push_back(std::move(changed));
  }
  return perturbed;
}

Array<ExpertId, 2> best_layout(ArrayView<const std::int64_t, 2> by_source, const Shape& shape, const Search& search) {
  std::vector<std::int64_t> load(by_source.extent(1));
  for (std::size_t r = 0; r < by_source.extent(0); ++r) {
    std::ranges::transform(by_source.row(r), load, load.begin(), std::plus<>{});
  }
  std::vector<std::vector<int>> candidates;  // [candidate][expert], replicas
  if (std::vector<int> even = even_replicas(load.size(), shape); !even.empty()) candidates.push_back(std::move(even));
  candidates.push_back(heap_replicas(load, shape));
  std::ranges::move(perturbed_replicas(candidates.back(), search.perturbations, shape), std::back_inserter(candidates));
  Array<ExpertId, 2> best;
  double best_seconds = std::numeric_limits<double>::infinity();
  for (const std::vector<int>& replicas : candidates) {
    Array<ExpertId, 2> layout = place_replicas(load, replicas, shape);
    if (candidates.size() == 1) return layout;
    const double seconds = seconds_of(route_inside_first(by_source, layout, shape.topology), search.prices);
    if (seconds < best_seconds) {
      best_seconds = seconds;
      best = std::move(layout);
    }
  }
  return best;
}

}  // namespace foremoe::laer

namespace foremoe {

namespace {

// Adds micro-steps max(first, 0), …, end − 1 of one layer to `sum`, [source rank][expert].
void add(const LoadTable& load, int first, int end, LayerId layer, Array<std::int64_t, 2>& sum) {
  for (int m = std::max(0, first); m < end; ++m) {
    std::ranges::transform(load.load.view()[m][layer].flat(), sum.flat(), sum.flat().begin(),
                           [](Tokens tokens, std::int64_t so_far) { return tokens.value + so_far; });
  }
}

class Laer final : public Policy {
 public:
  Laer(std::string_view name, std::string_view summary, const LaerOptions& options)
      : name_(name), summary_(summary), options_(options) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  bool plans_ahead(const PolicyInput& input) const override {
    return options_.history == 0 || input.previous_load == nullptr;
  }

  OnlineWork online() const override { return {.shards_experts = options_.sharded}; }

  std::vector<Option> options() override {
    return {integer_option({.name = "sharded",
                            .help = "1: experts are sharded over all ranks and gathered in every pass, as "
                                    "published. 0: experts are whole, and new ones are copied"},
                           options_.sharded),
            integer_option({.name = "perturbations",
                            .help = "Number of random changes of the replica counts to try; LAER-MoE's artifact uses "
                                    "2"},
                           options_.search.perturbations, {0, 64})};
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<Laer>(*this); }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable* former = former_load(input);
    if (former != nullptr && former->num_ranks() != input.load.num_ranks()) {
      throw InputError({.file = former->name, .field = "load"}, "must have as many ranks as the load to plan");
    }
    std::vector<Array<ExpertId, 3>> layouts(input.load.load.extent(1));  // [layer]
    FreePolicy policy{.name = name(), .place = {}};
    policy.place = [&](LayerId layer, ArrayView<const std::int64_t, 2>) {
      layouts[layer.index()] = lay_out(input, layer);
      return layouts[layer.index()];
    };
    policy.own_split = split_inside_first(input, layouts);
    return plan_freely(policy, input, pool);
  }

 private:
  // Returns [micro_step][rank][slot].
  Array<ExpertId, 3> lay_out(const PolicyInput& input, LayerId layer) const {
    const LoadTable& load = input.load;
    const laer::Shape shape{.topology = load.topology(),
                            .slots_per_rank = load.num_experts() / load.num_ranks() + input.options.guest_slots};
    Array<ExpertId, 3> layouts(
        {load.load.extent(0), load.load.extent(2), static_cast<std::size_t>(shape.slots_per_rank)});
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      const Array<ExpertId, 2> layout = laer::best_layout(expected(input, layer, m), shape, options_.search);
      std::ranges::copy(layout.flat(), layouts[m].flat().begin());
    }
    return layouts;
  }

  // Returns [source rank][expert], tokens. Sums suffice, because the layout does not depend on the unit.
  Array<std::int64_t, 2> expected(const PolicyInput& input, LayerId layer, int m) const {
    const LoadTable& load = input.load;
    Array<std::int64_t, 2> sum({load.load.extent(2), load.load.extent(3)});
    if (options_.history == 0) {
      add(load, m, m + 1, layer, sum);
    } else if (const LoadTable* former = input.previous_load; former != nullptr) {
      add(load, m - options_.history, m, layer, sum);
      const int missing = std::max(0, options_.history - m);
      add(*former, former->num_micro_steps() - missing, former->num_micro_steps(), layer, sum);
    } else {
      add(load, m > 0 ? m - options_.history : 0, m > 0 ? m : load.num_micro_steps(), layer, sum);
    }
    return sum;
  }

  std::string_view name_;
  std::string_view summary_;
  LaerOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_laer(const LaerOptions& options) {
  return std::make_unique<Laer>(
      "laer", "LAER-MoE: new layout for every micro-step from recent loads, tokens kept on their node", options);
}

std::unique_ptr<Policy> make_laer_oracle(const LaerOptions& options) {
  LaerOptions oracle = options;
  oracle.history = 0;
  return std::make_unique<Laer>("laer-oracle", "LAER-MoE in every micro-step, by that micro-step's load", oracle);
}

}  // namespace foremoe
